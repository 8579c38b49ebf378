"""One engine: the state of a rank and the commands and steps that change it. Used by one thread; knows no thread.

`EngineWorker` gives it a thread and an inbox, `OfflineEngine` a loop; the role says what happens to computed prompts
and sampled tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from headrace.engine.cache_messages import CacheCommand
from headrace.engine.errors import EngineError, ErrorCode, invalid
from headrace.engine.integrity import find_problems
from headrace.engine.ledger import Ledger
from headrace.engine.live import LiveRequest
from headrace.engine.loading import ModelError
from headrace.engine.memory import SequenceMemory
from headrace.engine.messages import (
    Cancel,
    CheckIntegrity,
    Command,
    Credit,
    EndAll,
    Event,
    FinishReason,
    GetStatus,
    Queued,
    ReplyT,
)
from headrace.engine.model import Model
from headrace.engine.pauses import Pauses
from headrace.engine.replay import least_keep_tokens, plan_replay
from headrace.engine.reports import EngineStatus, StepWork, engine_status
from headrace.engine.request import EngineRequest, RequestKey, RequestLimits, check_request
from headrace.engine.scheduler import Scheduler, StepPlan
from headrace.engine.sequence import Sequence, State
from headrace.engine.settings import EngineSettings
from headrace.engine.step import StepRunner
from headrace.engine.text.tokenizer import Tokenizer
from headrace.engine.tier_messages import Adopt, BeginLoad, EndLoad, OfferPrefix, TierSink, TierUnpin
from headrace.kvcache.pool import KVPool
from headrace.kvcache.tier.plan import Wanted

if TYPE_CHECKING:
    from headrace.engine.roles import Role

logger = logging.getLogger(__name__)


class Engine:
    """Model, pool, scheduler and ledger of one rank."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        settings: EngineSettings,
        role: Callable[[Engine], Role],
        *,
        clock: Callable[[], float],
        tokenizer: Tokenizer | None = None,
        tier: TierSink | None = None,
    ) -> None:
        """`clock` is monotonic seconds; deadlines and leases are on it. `role` builds the role around this engine.
        `tier` takes what the cache tier is to keep, on the engine's thread.

        Raises ModelError when the settings ask for bounded replay and the model's layers do not allow it.
        """
        if settings.replay == "compact" and pool.layout.has_snapshots and not model.supports_replay:
            raise ModelError(
                "this model has a kv source after its first consumer layer, which compact replay would skip: set "
                "engine.replay (and the router's replay.mode) to mask or off"
            )
        self.model = model
        self.pool = pool
        self.settings = settings
        self.clock = clock
        self.tokenizer = tokenizer
        self.ledger = Ledger()
        self.memory = SequenceMemory(pool, settings, tier)
        self.scheduler = Scheduler(
            settings,
            self.memory,
            held_choices=self._held_choices,
            on_admitted=self._admitted,
            on_lost=self._lost_for_want_of_images,
        )
        self.pauses = Pauses(settings, self.scheduler)
        self.runner = StepRunner(model, pool, settings)
        self.limits = RequestLimits(
            vocab_size=model.vocab_size,
            context_tokens=model.context_tokens,
            hidden_size=model.hidden_size,
            block_tokens=pool.layout.block_tokens,
            has_snapshots=pool.layout.has_snapshots,
            min_keep_tokens=least_keep_tokens(pool.layout),
            image_token_id=model.image_token_id,
            has_tokenizer=tokenizer is not None,
            max_choices=min(settings.max_choices, settings.max_sequences),
        )
        self.role = role(self)
        self._events: list[Event] = []
        self.steps = self.prefill_tokens = self.decode_tokens = 0
        self.last_step = StepWork()

    # --- commands ----------------------------------------------------------------------------------------------

    def apply(self, command: Command[ReplyT]) -> ReplyT:
        """Carry out one command between two steps. Raises EngineError with what the caller is to be told."""
        reply: object
        match command:
            case Cancel(key, reason):
                reply = self._cancel(key, reason)
            case Credit(key, limit):
                live = self.ledger.get(key)
                if live is not None:
                    live.credit_limit = max(live.credit_limit or 0, limit)
                reply = None
            case BeginLoad(request):
                reply = self._begin_load(request)
            case Adopt():
                reply = self.memory.loads.adopt(command)
            case EndLoad(key):
                self.memory.loads.end(key)
                reply = None
            case OfferPrefix():
                reply = self.memory.writes.offer_prefix(command)
            case TierUnpin(pins):
                self.memory.writes.unpin(pins)
                reply = None
            case CacheCommand():
                reply = command.run(self.memory.prefix)
            case EndAll(reason):
                self.close(reason)
                reply = None
            case GetStatus():
                reply = self.status()
            case CheckIntegrity(idle):
                reply = self.integrity(idle=idle)
            case _:
                reply = self.role.handle(cast("Command[object]", command))
        return cast("ReplyT", reply)

    def prepare(self, request: EngineRequest, *, width: int, longest: int, computes: bool) -> LiveRequest:
        """Check a request in full and end lower attempts of it; the answer is for `ledger.open` (L10, L16).

        `width`: choices that run here; `longest`: positions it may come to hold here; `computes`: the prompt is
        computed here, so that images need their embeddings.
        """
        check_request(request, self.limits)
        if computes and any(image.embeddings is None for image in request.images):
            raise invalid("an image has no embeddings; fetch them from the encoder first")
        self._check_fits(request, width, longest)
        for lower in self.ledger.claim(request.key):
            overtaken = EngineError(ErrorCode.ABORTED, f"overtaken by attempt {request.key.attempt}")
            self.end(lower, FinishReason.CANCELLED, overtaken)
        replay = plan_replay(request, self.pool.layout, self.settings)
        live = LiveRequest(request, self.ledger.next_order(), replay, width, accepted_at=self.clock())
        live.new_leader()
        live.loaded_blocks = self.memory.loads.take_over(request.key)
        return live

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def drain_events(self) -> tuple[Event, ...]:
        """Events since the last call, in order."""
        events, self._events = tuple(self._events), []
        return events

    # --- steps -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def next_expiry(self) -> float | None:
        """The earliest deadline, lease end or change of a pause of a live request, or end of a load, on the clock."""
        times = [time for live in self.ledger for time in self._expiries(live)]
        loads = self.memory.loads.next_expiry()
        return min(times if loads is None else [*times, loads], default=None)

    def expire(self) -> bool:
        """End requests whose deadline passed (L6), those whose holder is dead by its silence (L8), and those whose
        client has not read for too long; whether any."""
        now = self.clock()
        before = len(self.ledger)
        self.memory.loads.expire(now)
        for live in self.ledger:
            if live.request.deadline is not None and live.request.deadline <= now:
                late = EngineError(ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed")
                self.end(live, FinishReason.DEADLINE, late)
            elif live.lease_until is not None and live.lease_until <= now:
                dead = EngineError(ErrorCode.CANCELLED, "the lease was not renewed; its holder counts as dead")
                self.end(live, FinishReason.CANCELLED, dead)
            elif self.pauses.watch(live, now):
                slow = f"nothing of it was taken for {self.settings.pause_end_s:g} s; ask anew and read on"
                self.end(live, FinishReason.ERROR, EngineError(ErrorCode.TOO_SLOW, slow))
        return len(self.ledger) < before

    def step(self) -> bool:
        """Expire, schedule, forward, sample, commit. False when nothing could be done until a command or an expiry."""
        expired = self.expire()
        preemptions = self.scheduler.preemptions
        plan = self.scheduler.schedule()
        if not plan.chunks:
            return expired or self.scheduler.preemptions != preemptions
        now = self.clock()
        for chunk in plan.chunks:
            if chunk.sequence.live.begun_at is None:
                chunk.sequence.live.begun_at = now
        try:
            results = self.runner.run(plan)
        except Exception as error:  # noqa: BLE001 - L13: whatever a step raises ends requests, never the worker
            self._isolate(plan, error)
            return True
        self._count(plan, self.clock() - now)
        for chunk, result in zip(plan.chunks, results, strict=True):
            sequence = chunk.sequence
            sequence.alone = False
            if result.error is not None:
                self.fail(sequence.live, result.error)
                continue
            try:
                self.runner.commit(chunk, self.memory)
                self.role.computed(chunk, result.tokens)
            except Exception as error:  # noqa: BLE001 - L13: as above, for one request
                self.fail(sequence.live, error)
        return True

    # --- ends --------------------------------------------------------------------------------------------------

    def end(self, live: LiveRequest, reason: FinishReason, error: EngineError | None = None) -> None:
        """End every choice of a request that has not ended, and the request with them."""
        for sequence in live.sequences:
            self.drop(sequence)
        self.memory.loads.end(live.key)
        self.role.ended(live, reason, error)
        if self.ledger.get(live.key) is live:
            raise RuntimeError(f"{live.key} was ended by its role and is still live")

    def fail(self, live: LiveRequest, error: Exception) -> None:
        """End a request whose own work raised `error` (L13)."""
        logger.error("request %s failed", live.key, exc_info=error)
        if not isinstance(error, EngineError):
            error = EngineError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        if self.ledger.get(live.key) is live:
            self.end(live, FinishReason.ERROR, error)

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out of scheduling and release what it holds; a second time changes nothing."""
        if sequence.state is State.ENDED:
            return
        self.scheduler.remove(sequence)
        self.memory.writes.end(sequence)
        self.memory.release(sequence)
        sequence.state = State.ENDED

    def close(self, reason: str = "this worker stops") -> None:
        """End everything that lives, for a worker that stops or hands over."""
        stopping = EngineError(ErrorCode.UNAVAILABLE, f"{reason}; continue elsewhere")
        for live in self.ledger:
            self.end(live, FinishReason.ERROR, stopping)
        self.memory.loads.clear()

    # --- reports -----------------------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """A report for load balancing."""
        return self.role.report(engine_status(self))

    def queued_before(self, live: LiveRequest) -> Queued:
        """What stands before a request that was just queued."""
        leaders = [sequence for sequence in self.scheduler.queue if sequence.live is not live]
        tokens = sum(sequence.pending for sequence in (*leaders, *self.scheduler.running))
        return Queued(len(leaders), tokens)

    def integrity(self, *, idle: bool = False) -> tuple[str, ...]:
        """Every broken invariant in words (L11)."""
        return find_problems(self, idle=idle)

    # --- inside ------------------------------------------------------------------------------------------------

    def _cancel(self, key: RequestKey, reason: FinishReason) -> bool:
        found = [live for live in self.ledger.of_request(key.request_id) if live.key.attempt <= key.attempt]
        for live in found:
            self.end(live, reason)
        return self.memory.loads.end_up_to(key) or bool(found)

    def _begin_load(self, request: EngineRequest) -> Wanted:
        check_request(request, self.limits)
        if self.ledger.get(request.key) is not None:
            raise EngineError(ErrorCode.ABORTED, f"{request.key} is running already")
        replay = plan_replay(request, self.pool.layout, self.settings)
        leader = LiveRequest(request, self.ledger.next_order(), replay, 1).new_leader()
        block = self.pool.layout.block_tokens
        keys = self.memory.extend_keys(leader, replay.largest_prefix(leader.known, block) // block)
        return self.memory.loads.begin(request, keys)

    def _admitted(self, sequence: Sequence) -> None:
        # It holds its prefix itself now.
        self.memory.loads.end(sequence.live.key)
        self.role.admitted(sequence)

    def _held_choices(self) -> int:
        holding = (State.RESERVED, State.HANDED_OVER)
        return sum(live.width for live in self.ledger if live.sequences[0].state in holding)

    def _check_fits(self, request: EngineRequest, width: int, longest: int) -> None:
        """A request that could never progress alone in this pool is refused (L12)."""
        layout, capacity = self.pool.layout, self.pool.row_region.capacity
        prompt = request.prompt_length // layout.block_tokens + width
        needed = max(layout.blocks_for(min(longest, self.model.context_tokens)), prompt)
        if needed > capacity:
            raise EngineError(
                ErrorCode.NEVER_FITS,
                f"the request needs {needed} blocks of {layout.block_tokens} tokens, this worker has {capacity}; lower "
                "max_tokens or n, shorten the prompt, or give the worker more kv_bytes",
            )

    def _isolate(self, plan: StepPlan, error: Exception) -> None:
        """A step failed. One sequence: it is guilty. Several: each runs alone next, until the guilty one has failed."""
        if len(plan.chunks) == 1:
            self.fail(plan.chunks[0].sequence.live, error)
            return
        logger.warning("a step of %d sequences failed, trying them one by one", len(plan.chunks), exc_info=error)
        for chunk in plan.chunks:
            self.scheduler.restart(chunk.sequence)

    def _lost_for_want_of_images(self, sequence: Sequence) -> None:
        message = "memory ran out and the request's images are not here to compute it again; continue elsewhere"
        self.role.lost(sequence, EngineError(ErrorCode.UNAVAILABLE, message))

    def _count(self, plan: StepPlan, seconds: float) -> None:
        self.steps += 1
        self.last_step = StepWork(
            seconds,
            len(plan.chunks),
            plan.num_tokens,
            sum(chunk.start for chunk in plan.chunks),
            sum(chunk.length * (chunk.start + chunk.end) // 2 for chunk in plan.chunks),
        )
        for chunk in plan.chunks:
            if chunk.end > chunk.sequence.live.prompt_length and chunk.length == 1:
                self.decode_tokens += 1
            else:
                self.prefill_tokens += chunk.length

    def _expiries(self, live: LiveRequest) -> list[float]:
        times = (live.request.deadline, live.lease_until, self.pauses.next_change(live))
        return [time for time in times if time is not None]
