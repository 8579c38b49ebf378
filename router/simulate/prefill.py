"""One prefill rank in simulated time: a queue, batches of at most so many computed tokens, a cache, maybe a store.

Batches are made as engine/scheduler.py makes them: what runs goes on first, then the queue in order of arrival, and the
last prompt that fits only in part is split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from headrace.router.cost.prefill import PrefillBatch
from headrace.router.reports import Report
from headrace.router.simulate.cache import BlockCache, SharedStore
from headrace.router.simulate.clock import Clock
from headrace.router.simulate.models import PrefillModel
from headrace.router.simulate.request import Attempt

Publish = Callable[[int, list[bytes], list[bytes]], None]
"""(rank, blocks stored, blocks removed): what the rank tells the router's index."""


class PrefillRank:
    """Computes prompts. `done` is called at the end of a prompt's last batch."""

    def __init__(
        self,
        number: int,
        clock: Clock,
        model: PrefillModel,
        batch_tokens: int,
        block_tokens: int,
        cache: BlockCache,
        store: SharedStore | None,
        publish: Publish,
        done: Callable[[Attempt], None],
    ) -> None:
        self.number = number
        self.cache = cache
        self.alive = True
        self.slowdown = 1.0
        """Every batch takes so many times longer than the model says."""
        self._clock = clock
        self._model = model
        self._batch_tokens = batch_tokens
        self._block_tokens = block_tokens
        self._store = store
        self._publish = publish
        self._done = done
        self._queue: deque[Attempt] = deque()
        self._batch: list[tuple[Attempt, int]] = []
        """(attempt, tokens of it that the running batch computes)."""
        self.life = 0
        """Events of an earlier life find another number and do nothing."""
        self._link_free_at = 0.0
        self.steps = 0
        self.last_step_s = 0.0
        self.last_batch: PrefillBatch | None = None
        """What the last step computed."""
        self._running: PrefillBatch | None = None
        self._running_s = 0.0
        self.busy_s = 0.0
        self.computed_tokens = 0
        self.attention = 0.0
        self.waiting_tokens = 0
        """Prompt tokens in the queue, as they came: what is cached is known only when a prompt begins."""

    def submit(self, attempt: Attempt) -> None:
        """Take a prompt."""
        now = self._clock.now
        attempt.submitted_at = attempt.ready_at = now
        attempt.left = attempt.prompt_tokens
        if self._store is not None:
            self._load(attempt, self._store)
        self._queue.append(attempt)
        self.waiting_tokens += attempt.left
        if not self._batch:
            self._wake(attempt.ready_at)

    def cancel(self, attempt: Attempt) -> None:
        """Forget a prompt. One that is being computed leaves with the end of its batch."""
        if attempt in self._queue:
            self._queue.remove(attempt)
            self.waiting_tokens -= attempt.left

    def die(self) -> list[Attempt]:
        """The process is gone, with its cache. Returns what was lost."""
        lost = list(dict.fromkeys([*(attempt for attempt, _ in self._batch), *self._queue]))
        self.life += 1
        self.alive = False
        self._queue.clear()
        self._batch = []
        self.waiting_tokens = 0
        self.cache.clear()
        return lost

    def come_back(self) -> None:
        """A new life, with nothing in it."""
        self.alive, self.slowdown, self.steps, self.last_step_s = True, 1.0, 0, 0.0
        self._link_free_at = self._clock.now

    def report(self) -> Report:
        """What it says of itself."""
        running = len(self._batch)
        begun = self._queue[0].begun if self._queue else False
        return Report(
            queued_requests=len(self._queue) - int(begun),
            queued_tokens=self.waiting_tokens + sum(tokens for _, tokens in self._batch),
            running_requests=running,
            step=self.steps,
            step_s=self.last_step_s,
        )

    @property
    def idle(self) -> bool:
        return not self._queue and not self._batch

    def _usable(self, attempt: Attempt) -> int:
        """Blocks that may be taken from a cache: the last token has to be computed."""
        return min(len(attempt.request.keys), (attempt.prompt_tokens - 1) // self._block_tokens)

    def _load(self, attempt: Attempt, store: SharedStore) -> None:
        """Begin to load what the store has beyond the own prefix, while the prompt waits in the queue."""
        now, keys, usable = self._clock.now, attempt.request.keys, self._usable(attempt)
        own = self.cache.leading(keys, usable)
        there = store.leading(keys, usable, now) if own < usable else 0
        if there > own:
            attempt.loaded_tokens = (there - own) * self._block_tokens
            attempt.hit_tokens = there * self._block_tokens
            self._link_free_at = max(self._link_free_at, now) + attempt.loaded_tokens / store.tokens_per_s
            attempt.ready_at = self._link_free_at

    def _wake(self, time: float) -> None:
        self._clock.at(time, self._start, self.life)

    def _begin(self, attempt: Attempt) -> None:
        """Look the prefix up, again: the router's number was a hint."""
        hit = self.cache.leading(attempt.request.keys, self._usable(attempt)) * self._block_tokens
        if hit >= attempt.hit_tokens:
            attempt.hit_tokens, attempt.loaded_tokens = hit, 0
        attempt.begun = True
        attempt.left = attempt.prompt_tokens - attempt.hit_tokens

    def _start(self, life: int) -> None:
        if life != self.life or self._batch:
            return
        budget, now = self._batch_tokens, self._clock.now
        hits = with_hit = 0
        ratio = attention = 0.0
        batch = self._batch
        held_back: list[Attempt] = []
        while self._queue and budget > 0:
            attempt = self._queue.popleft()
            if attempt.ready_at > now:
                held_back.append(attempt)
                continue
            self.waiting_tokens -= attempt.left
            if not attempt.begun:
                self._begin(attempt)
                hits += attempt.hit_tokens
                with_hit += attempt.hit_tokens > 0
                ratio += attempt.hit_tokens / attempt.prompt_tokens
            tokens = min(attempt.left, budget)
            attention += tokens * (attempt.prompt_tokens - attempt.left + tokens / 2)
            batch.append((attempt, tokens))
            budget -= tokens
            attempt.left -= tokens
            if attempt.left:
                self._queue.appendleft(attempt)
                self.waiting_tokens += attempt.left
        self._queue.extendleft(reversed(held_back))
        if not batch:
            if self._queue:
                self._wake(min(attempt.ready_at for attempt in self._queue))
            return
        count, computed = len(batch), self._batch_tokens - budget
        told = PrefillBatch(count, computed, hits, with_hit / count, ratio / count, attention)
        seconds = self.slowdown * self._model.seconds(told)
        self._running = told
        self.computed_tokens += computed
        self.attention += attention
        self.busy_s += seconds
        self._running_s = seconds
        self._clock.after(seconds, self._finish, self.life)

    def _finish(self, life: int) -> None:
        if life != self.life:
            return
        self.steps += 1
        self.last_batch, self.last_step_s = self._running, self._running_s
        batch, self._batch = self._batch, []
        done = [attempt for attempt, _ in batch if attempt.left == 0]
        self._keep([attempt.request.keys for attempt in done])
        for attempt in done:
            self._done(attempt)
        self._start(self.life)

    def _keep(self, prompts: Sequence[Sequence[bytes]]) -> None:
        """They are in the cache now; the router is told in one event, as a worker tells it of a step."""
        held: dict[bytes, bool] = {}
        for keys in prompts:
            stored, removed = self.cache.add(keys)
            held |= dict.fromkeys(stored, True)
            held |= dict.fromkeys(removed, False)
            if self._store is not None:
                self._store.add(stored, self._clock.now)
        if held:
            gone = [key for key, here in held.items() if not here]
            self._publish(self.number, [key for key, here in held.items() if here] if gone else list(held), gone)
