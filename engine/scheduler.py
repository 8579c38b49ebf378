"""Which sequences take part in a step and with how many tokens; who waits, who is preempted.

Decode rows first, so that decode never waits for prefill; prefill chunks fill the rest of the token budget. When memory
is short the youngest sequence gives way, so the oldest always progresses (L6, L12).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from headrace.engine.errors import overloaded
from headrace.engine.memory import SequenceMemory
from headrace.engine.sequence import Sequence, State
from headrace.engine.settings import EngineSettings


@dataclass(frozen=True)
class Chunk:
    """`length` pending tokens of one sequence from position `start`, computed in one step."""

    sequence: Sequence
    start: int
    length: int
    choices: tuple[int, ...]
    """Choices that get a token sampled from the chunk's last row; empty when more tokens are pending after it."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class StepPlan:
    """Chunks of one forward pass, decode rows before prefill chunks."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


class Scheduler:
    """Owns the queue and the running set; memory itself is SequenceMemory's."""

    def __init__(
        self,
        settings: EngineSettings,
        memory: SequenceMemory,
        *,
        held_choices: Callable[[], int],
        on_admitted: Callable[[Sequence], None],
        on_lost: Callable[[Sequence], None],
    ) -> None:
        """`held_choices` counts choices that hold a slot without running (reserved, handed over). `on_lost` ends a
        sequence that can neither be spilled nor recomputed here (its images are elsewhere)."""
        self._settings = settings
        self._memory = memory
        self._on_lost = on_lost
        self._held_choices = held_choices
        self._on_admitted = on_admitted
        self.running: list[Sequence] = []
        """By age, oldest first."""
        self._queue: list[Sequence] = []
        """Sequences that have run before, then by priority and age."""
        self.preemptions = 0

    @property
    def queue(self) -> tuple[Sequence, ...]:
        return tuple(self._queue)

    @property
    def waiting(self) -> int:
        """Queued sequences that never ran."""
        return len(self._queue) - self.preempted

    @property
    def preempted(self) -> int:
        return sum(1 for sequence in self._queue if sequence.started)

    @property
    def returning(self) -> int:
        """Of the preempted, those that will run as soon as there is memory. The others wait for their readers."""
        return sum(1 for sequence in self._queue if sequence.started and sequence.live.has_credit)

    @property
    def has_work(self) -> bool:
        """Whether a step might do something now."""
        return any(sequence.live.has_credit for sequence in (*self.running, *self._queue))

    @property
    def prompt_budget(self) -> int:
        """Tokens of a step that neither running sequences nor what they have pending take."""
        return max(0, self._settings.max_batched_tokens - sum(sequence.pending for sequence in self.running))

    def require_queue_space(self) -> None:
        """Raises EngineError RESOURCE_EXHAUSTED when `max_waiting` sequences wait (L12)."""
        if self.waiting >= self._settings.max_waiting:
            raise overloaded(f"{self.waiting} requests wait already", self._settings.retry_after_s)

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a new sequence; the caller asked for space before it made the request live."""
        insort(self._queue, sequence, key=_queue_rank)

    def admit(self, sequence: Sequence) -> bool:
        """Give a new sequence its memory now and let it run, without a place in the queue; False when it does not fit,
        and nothing is taken."""
        if not self._try_admit(sequence):
            return False
        self.run(sequence)
        self._on_admitted(sequence)
        return True

    def run(self, sequence: Sequence) -> None:
        """Let a sequence that holds its memory take part in steps (admission, fork, decode's commit)."""
        sequence.state = State.RUNNING
        sequence.started = True
        insort(self.running, sequence, key=_age)

    def remove(self, sequence: Sequence) -> None:
        """Stop scheduling a sequence; its memory is the caller's to release."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.QUEUED and sequence in self._queue:
            self._queue.remove(sequence)

    def schedule(self) -> StepPlan:
        """The next step; an empty plan when nothing can run."""
        suspect = next((sequence for sequence in self.running if sequence.alone and sequence.live.has_credit), None)
        if suspect is not None:
            return self._alone(suspect)
        budget = self._settings.max_batched_tokens
        decodes: list[Chunk] = []
        for sequence in tuple(self.running):
            if sequence.state is not State.RUNNING or sequence.pending != 1 or not sequence.live.has_credit:
                continue
            if budget > 0 and self._make_room(sequence, sequence.known):
                decodes.append(self._chunk(sequence, 1))
                budget -= 1
        prefills: list[Chunk] = []
        for sequence in tuple(self.running):
            if budget <= 0:
                break
            if sequence.state is not State.RUNNING or sequence.pending <= 1 or not sequence.live.has_credit:
                continue
            chunk = self._chunk(sequence, budget)
            if self._make_room(sequence, chunk.end):
                prefills.append(chunk)
                budget -= chunk.length
        while budget > 0:
            admitted = self._admit_next()
            if admitted is None:
                break
            if admitted.alone:
                if decodes or prefills:
                    break
                return self._alone(admitted)
            chunk = self._chunk(admitted, budget)
            (decodes if chunk.length == 1 else prefills).append(chunk)
            budget -= chunk.length
        return StepPlan(tuple(chunk for chunk in (*decodes, *prefills) if chunk.sequence.state is State.RUNNING))

    def preempt(self, victim: Sequence) -> None:
        """Take a running sequence's memory: spill it, else forget it for recomputation, else it is lost here."""
        self.running.remove(victim)
        victim.state = State.QUEUED
        self.preemptions += 1
        victim.live.preemptions += 1
        if self._memory.spill(victim) or self._memory.forget(victim):
            insort(self._queue, victim, key=_queue_rank)
        else:
            self._on_lost(victim)

    def restart(self, sequence: Sequence) -> None:
        """After a failed step: try again by itself (L13).

        Rows are written by position, so writing them again is harmless; a slot's rings may be half overwritten, so
        layouts with slots recompute from the tokens.
        """
        sequence.alone = True
        if not self._memory.pool.layout.slot_bytes:
            return
        self.running.remove(sequence)
        sequence.state = State.QUEUED
        if self._memory.forget(sequence):
            insort(self._queue, sequence, key=_queue_rank)
        else:
            self._on_lost(sequence)

    # --- inside ------------------------------------------------------------------------------------------------

    def _alone(self, sequence: Sequence) -> StepPlan:
        chunk = self._chunk(sequence, self._settings.max_batched_tokens)
        return StepPlan((chunk,) if self._make_room(sequence, chunk.end) else ())

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        """As many pending tokens as the budget allows, ending at the next position where a snapshot is due."""
        start = sequence.computed
        end = min(sequence.known, start + budget)
        cuts = [cut for cut in sequence.live.replay.snapshot_positions if start < cut < end]
        end = min(cuts, default=end)
        if end < sequence.known:
            return Chunk(sequence, start, end - start, ())
        live = sequence.live
        if len(live.sequences) == live.request.n:
            return Chunk(sequence, start, end - start, (sequence.choice,))
        fresh = tuple(choice for choice in range(live.request.n) if not live.request.delivered_to(choice))
        return Chunk(sequence, start, end - start, fresh)

    def _make_room(self, sequence: Sequence, positions: int) -> bool:
        """Rows for `positions` positions, preempting as needed; False when the sequence itself had to give way."""
        while not self._memory.grow(sequence, positions):
            victim = self._victim(sequence)
            if victim is not None:
                self.preempt(victim)
            elif not self._drop_spilled():
                self.preempt(sequence)
                return False
        return True

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Whoever is paused for want of credit, since a slow client stops only itself; else the youngest."""
        others = [other for other in self.running if other is not sequence]
        paused = [other for other in others if not other.live.has_credit]
        younger = [other for other in others if other.age > sequence.age]
        candidates = paused or younger
        return candidates[-1] if candidates else None

    def _drop_spilled(self) -> bool:
        """Turn the youngest spilled sequence that still shares rows of the pool into one to recompute."""
        for queued in sorted(self._queue, key=_age, reverse=True):
            if queued.blocks:
                self.preemptions += 1
                if not self._memory.forget(queued):
                    self._queue.remove(queued)
                    self._on_lost(queued)
                return True
        return False

    def _admit_next(self) -> Sequence | None:
        """Give the first of the queue its memory, if it fits without preempting anyone who makes progress."""
        sequence = next((queued for queued in self._queue if queued.live.has_credit), None)
        while sequence is not None and not self._try_admit(sequence):
            paused = [other for other in self.running if not other.live.has_credit]
            if paused:
                self.preempt(paused[-1])
            elif self.running or not self._drop_spilled():
                return None
            if sequence not in self._queue:
                return None
        if sequence is not None:
            self._queue.remove(sequence)
            self.run(sequence)
            self._on_admitted(sequence)
        return sequence

    def _try_admit(self, sequence: Sequence) -> bool:
        choices = sequence.live.width if sequence.is_leader else 1
        if self.choices_held() + choices > self._settings.max_sequences:
            return False
        return self._memory.admit(sequence, spare_rows=len(self.running))

    def choices_held(self) -> int:
        to_fork = sum(sequence.live.width - 1 for sequence in self.running if sequence.is_leader)
        return len(self.running) + to_fork + self._held_choices()


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.age


def _queue_rank(sequence: Sequence) -> tuple[bool, int, int, int]:
    return (not sequence.started, 0 if sequence.started else -sequence.live.request.priority, *sequence.age)
