"""The decode role: promise memory, take prompts over from the landing region, decode and emit.

A reservation is answered between two steps and waits for nothing (L23). Nothing a peer writes reaches the pool but
through `LandingRegion.take`, which copies and then verifies the copy (L1, L7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.engine.errors import EngineError, ErrorCode, invalid, overloaded
from headrace.engine.landings import Landings
from headrace.engine.live import LiveRequest
from headrace.engine.messages import (
    Command,
    Commit,
    Committed,
    EngineStatus,
    FinishReason,
    GetQuarantined,
    PoolCounts,
    RebuildLanding,
    Renew,
    Reserve,
    Reserved,
    SenderDied,
    TakeDrainedLandings,
    TransferEnded,
)
from headrace.engine.request import RequestKey
from headrace.engine.roles import Role, WholeRole
from headrace.engine.sequence import SampledToken, State
from headrace.kvcache.handle import Handle, HandleRejected
from headrace.kvcache.landing import LandingRegion
from headrace.kvcache.landing_types import (
    ChecksumMismatch,
    LandingError,
    NoticeResult,
    OutOfLanding,
    PartRequest,
    PartTarget,
    StaleAttempt,
)

if TYPE_CHECKING:
    from headrace.engine.core import Engine

NO_DEADLINE = float("inf")
"""A landing reservation ends with its request, which has lease and deadline of its own."""


def decode_role(landing: LandingRegion) -> Callable[[Engine], Role]:
    """A factory for Engine(role=…). The engine thread owns `landing` from here on."""
    return lambda engine: DecodeRole(engine, landing)


class DecodeRole(WholeRole):
    """Reserve, Commit and what ends a transfer; Submit too, for the canary that readiness needs (L18)."""

    def __init__(self, engine: Engine, landing: LandingRegion) -> None:
        super().__init__(engine)
        self._landings = Landings(landing)
        self._handles: dict[RequestKey, Handle] = {}
        """The live grant of every reservation."""
        self._peak = 0
        """Most choices that held a slot at once."""

    def handle(self, command: Command[object]) -> object:
        match command:
            case Reserve():
                return self._reserve(command)
            case Commit():
                return self._commit(command)
            case TransferEnded(transfer_id, complete):
                return self._landings.notice(transfer_id, complete=complete)
            case GetQuarantined():
                return self._landings.quarantined()
            case SenderDied(incarnation):
                handles = self._landings.sender_died(incarnation)
                return tuple(RequestKey(handle.request_id, handle.attempt) for handle in handles)
            case RebuildLanding():
                return self._landings.rebuild()
            case TakeDrainedLandings():
                return self._landings.take_drained()
            case Renew(keys):
                return self._renew(keys)
            case _:
                return super().handle(command)

    def ended(self, live: LiveRequest, reason: FinishReason, error: EngineError | None) -> None:
        """A reservation that ends gives its landing rows up: to quarantine, while a peer may still write them (L7)."""
        if self._handles.pop(live.key, None) is not None:
            self._landings.abort(live.key.request_id, live.key.attempt)
        super().ended(live, reason, error)

    def problems(self) -> tuple[str, ...]:
        found = list(self._landings.problems())
        for key in self._handles:
            live = self.engine.ledger.get(key)
            if live is None or live.sequences[0].state is not State.RESERVED:
                found.append(f"landing rows of {key} are kept for a request that is not reserved")
        return tuple(found)

    def idle(self) -> bool:
        return self._landings.idle

    def report(self, status: EngineStatus) -> EngineStatus:
        found = self._landings.newest.integrity()
        landing = (
            PoolCounts(f"landing_{name}", units.capacity, units.free, quarantined=units.quarantined)
            for name, units in (("rows", found.rows), ("slots", found.slots))
            if units.capacity
        )
        return replace(
            status,
            booked_peak=self._peak,
            pools=(*status.pools, *landing),
            quarantined_bytes=self._landings.quarantined_bytes,
            landing_sound=not self._landings.newest.too_much_quarantine,
        )

    # --- reservations ------------------------------------------------------------------------------------------

    def _reserve(self, command: Reserve) -> Reserved:
        request, engine = command.request, self.engine
        live = engine.ledger.get(request.key)
        if live is not None:
            return self._again(command, live)
        if request.n > 1 and any(request.delivered):
            raise invalid("a continuation of several choices is sent as one request per choice")
        longest = request.prompt_length + request.max_tokens
        live = engine.prepare(request, width=request.n, longest=longest, computes=command.compute_here)
        retry = engine.settings.retry_after_s
        if engine.scheduler.returning:
            raise overloaded("preempted requests wait for memory and come first", retry)
        if not command.compute_here:
            self._check_landing(live)
        held = engine.scheduler.choices_held()
        if held + request.n > engine.settings.max_sequences:
            raise overloaded(f"{request.n} slots are wanted, {engine.settings.max_sequences - held} are free", retry)
        handle = None
        if command.compute_here:
            self._book_computing(live)
        else:
            handle = self._book_landing(live, command.sender, held)
        live.lease_until = engine.clock() + engine.settings.lease_s
        engine.ledger.open(live)
        if handle is not None:
            self._handles[live.key] = handle
        self._peak = max(self._peak, self._booked())
        return Reserved(live.key, live.held_blocks, handle, engine.settings.lease_s)

    def _again(self, command: Reserve, live: LiveRequest) -> Reserved:
        """The same reservation asked for twice: the first answer may have been lost."""
        handle = self._handles.get(live.key)
        waits = live.computes_here and not live.sampled if command.compute_here else handle is not None
        if not waits or live.request != command.request:
            raise EngineError(ErrorCode.ABORTED, f"{live.key} is under way already; use a higher attempt")
        self._renew((live.key,))
        return Reserved(live.key, live.held_blocks, handle, self.engine.settings.lease_s)

    def _booked(self) -> int:
        """Choices that hold a slot or wait for it after a preemption, from the live requests alone. Those that were
        spilled as their client reads slowly have given it up."""
        return sum(live.width - len(live.reasons) for live in self.engine.ledger if not live.set_aside)

    def _book_computing(self, live: LiveRequest) -> None:
        """Memory for a prompt that is computed here, at once and whole. It takes part in steps like one that was
        preempted and comes back, within what they have room for: decode never waits for prefill."""
        engine, leader = self.engine, live.sequences[0]
        budget, retry = engine.scheduler.prompt_budget, engine.settings.retry_after_s
        leader.out = self.output_of(live.request, 0)
        if not engine.scheduler.admit(leader):
            raise overloaded("the pool has no room for the prompt now", retry)
        if leader.pending > budget:
            engine.drop(leader)
            raise overloaded(f"{leader.pending} tokens are not cached here, a step has room for {budget}", retry)
        live.computes_here = True
        live.held_blocks = leader.committed

    def _check_landing(self, live: LiveRequest) -> None:
        rows = self._landings.newest.rows.shape[0]
        to_send = self.engine.pool.layout.blocks_for(live.sequences[0].known)
        if to_send > rows:
            raise EngineError(
                ErrorCode.NEVER_FITS,
                f"the prompt's {to_send} blocks exceed the {rows} rows of the landing region; shorten it, or give the "
                "worker more landing memory",
            )

    def _book_landing(self, live: LiveRequest, sender: str | None, held: int) -> Handle:
        """Rows and slots for a prompt that a peer computes, and landing rows for what it has to send."""
        engine, leader = self.engine, live.sequences[0]
        if not engine.memory.reserve(leader, spare_rows=held):
            raise overloaded("the pool has no room for the prompt now", engine.settings.retry_after_s)
        try:
            handle = self._grant(live, (self._missing(live),), sender)
        except EngineError:
            engine.memory.release(leader)
            raise
        leader.state = State.RESERVED
        leader.out = self.output_of(live.request, 0)
        return handle

    def _grant(self, live: LiveRequest, parts: tuple[PartRequest, ...], sender: str | None) -> Handle:
        key, landing = live.key, self._landings.newest
        try:
            return landing.reserve(key.request_id, key.attempt, parts, deadline=NO_DEADLINE, sender=sender)
        except OutOfLanding as error:
            raise overloaded(str(error), self.engine.settings.retry_after_s) from error
        except StaleAttempt as error:
            raise EngineError(ErrorCode.ABORTED, str(error)) from error
        except LandingError as error:
            raise EngineError(ErrorCode.UNAVAILABLE, f"{error}; reserve again") from error

    def _missing(self, live: LiveRequest) -> PartRequest:
        """What has to be sent: blocks that are not held, and one slot for all choices where the layout has slots."""
        layout = self.engine.pool.layout
        blocks = range(live.held_blocks, layout.blocks_for(live.sequences[0].known))
        return PartRequest(None, tuple(blocks), with_slot=layout.slot_bytes > 0)

    def _renew(self, keys: tuple[RequestKey, ...]) -> tuple[RequestKey, ...]:
        unknown: list[RequestKey] = []
        until = self.engine.clock() + self.engine.settings.lease_s
        for key in keys:
            live = self.engine.ledger.get(key)
            if live is None:
                unknown.append(key)
            elif live.lease_until is not None:
                live.lease_until = until
        return tuple(unknown)

    # --- the hand-over -----------------------------------------------------------------------------------------

    def _commit(self, command: Commit) -> Committed:
        notice = self._landings.notice(command.handle.transfer_id, complete=True)
        live = self.engine.ledger.get(command.key)
        if live is None:
            raise EngineError(ErrorCode.NOT_FOUND, f"no reservation {command.key}: it ended or its lease ran out")
        leader = live.sequences[0]
        if leader.state is not State.RESERVED:
            return Committed()
        if notice not in (NoticeResult.READY, NoticeResult.REPEATED):
            raise EngineError(
                ErrorCode.FAILED_PRECONDITION,
                f"transfer {command.handle.transfer_id} is {notice.value}, not the one {command.key} waits for",
            )
        self._check_exact(command, live)
        begun = self.engine.clock()
        resend = self._take(command, live)
        live.verify_s += self.engine.clock() - begun
        if resend is not None:
            self._handles[live.key] = resend
            return Committed(resend)
        del self._handles[live.key]
        try:
            self._admit(live, command)
        except Exception as error:
            self.engine.fail(live, error)
            raise
        return Committed()

    def _admit(self, live: LiveRequest, command: Commit) -> None:
        """The prompt's memory is complete: name its blocks, fork, and take the first tokens before any step."""
        leader, counts = live.sequences[0], command.counts
        leader.computed = leader.high = leader.known
        live.cached, live.loaded, live.computed = counts.cached, counts.loaded, counts.computed
        live.recomputed = counts.recomputed
        live.begun_at = self.engine.clock()
        # Prefill gives the tier the prompt's blocks, and those of delivered tokens, which it computed.
        leader.offered = leader.known // self.engine.pool.layout.block_tokens
        self.engine.memory.commit(leader)
        self.engine.scheduler.run(leader)
        if leader.is_leader:
            self.fork(live)
        for token in command.first:
            self.take_token(live.sequences[token.choice], SampledToken(token.token_id, token.logprob))

    def _take(self, command: Commit, live: LiveRequest) -> Handle | None:
        """Copy landed rows into the reservation's, verified; a new grant for those that did not match (L1)."""
        leader, pool = live.sequences[0], self.engine.pool
        targets = tuple(
            PartTarget(tuple(leader.blocks[block] for block in part.blocks), None if part.slot is None else leader.slot)
            for part in command.handle.parts
        )
        try:
            self._landings.of(command.handle).take(
                command.handle, command.checksums, targets, pool.rows, pool.slots if pool.layout.slot_bytes else None
            )
        except ChecksumMismatch as error:
            bad = tuple(PartRequest(part.choice, part.blocks, part.slot is not None) for part in error.bad)
            return self._grant(live, bad, command.sender)
        except (LandingError, HandleRejected) as error:
            raise EngineError(ErrorCode.FAILED_PRECONDITION, str(error)) from error
        return None

    def _check_exact(self, command: Commit, live: LiveRequest) -> None:
        """Nothing is copied for a commit that names another grant or is incomplete (L1, L4)."""
        problems: list[str] = []
        handle = self._handles[live.key]
        problems += [f"handle: {reason} differs" for reason in command.handle.check(handle)]
        if sorted(token.choice for token in command.first) != list(range(live.request.n)):
            problems.append(f"first tokens of choices 0 to {live.request.n - 1} are needed, each once")
        if any(not 0 <= token.token_id < self.engine.model.vocab_size for token in command.first):
            problems.append("a first token is outside the vocabulary")
        counts = command.counts
        if counts.cached + counts.loaded + counts.computed != live.prompt_length:
            problems.append(f"{counts} do not add up to the prompt's {live.prompt_length} tokens (L27)")
        if problems:
            raise EngineError(ErrorCode.FAILED_PRECONDITION, f"commit of {command.key}: {'; '.join(problems)}")
