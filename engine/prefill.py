"""The prefill role: compute prompts, sample first tokens, name finished rows as they become ready to push.

Every row that is named is pinned until the service says that its transfer is terminal, whatever becomes of the request
(L7): a request may end at once, its rows stay in place under a reader.
"""

from __future__ import annotations

from headrace.engine.errors import EngineError, ErrorCode, invalid
from headrace.engine.ledger import request_reason
from headrace.engine.live import LiveRequest
from headrace.engine.marks import stream_mark
from headrace.engine.messages import (
    BlockRow,
    Command,
    FinishReason,
    FirstToken,
    HandedOver,
    Prefill,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    Progress,
    Queued,
    RowsReady,
    Unpin,
)
from headrace.engine.request import RequestKey
from headrace.engine.roles import Role
from headrace.engine.scheduler import Chunk
from headrace.engine.sequence import SampledToken, Sequence, State
from headrace.kvcache.region import NotPinned


def push_pin(key: RequestKey) -> str:
    """Name under which the pool pins what a request's transfers read."""
    return f"push:{key}"


class PrefillRole(Role):
    """Prefill, Unpin and HandedOver; results travel as events."""

    def handle(self, command: Command[object]) -> object:
        match command:
            case Prefill():
                return self._accept(command)
            case Unpin():
                self._unpin(command)
            case HandedOver(key):
                live = self.engine.ledger.get(key)
                if live is not None:
                    self._hand_over_complete(live)
            case _:
                raise self.refuse(command)
        return None

    def _accept(self, command: Prefill) -> Queued:
        request, engine = command.request, self.engine
        if engine.ledger.get(request.key) is not None:
            raise EngineError(ErrorCode.ABORTED, f"{request.key} is running already")
        if request.n > 1 and any(request.delivered):
            raise invalid("a continuation of several choices is sent as one request per choice")
        delivered = len(request.delivered_to(0))
        longest = request.prompt_length + delivered + 1
        live = engine.prepare(request, width=1, longest=longest, computes=True)
        engine.scheduler.require_queue_space()
        live.held_blocks = live.reported_blocks = command.held_blocks
        engine.ledger.open(live)
        engine.scheduler.enqueue(live.sequences[0])
        return engine.queued_before(live)

    def admitted(self, sequence: Sequence) -> None:
        live = sequence.live
        if not live.accepted_told:
            live.accepted_told = True
            self.engine.emit(PrefillAccepted(live.key, live.prompt_length, live.cached))
        self._report(sequence)

    def computed(self, chunk: Chunk, tokens: tuple[SampledToken, ...]) -> None:
        sequence, live = chunk.sequence, chunk.sequence.live
        self._report(sequence)
        if not chunk.choices:
            self.engine.emit(Progress(live.key, sequence.computed))
            return
        block, inside = divmod(sequence.computed, self.engine.pool.layout.block_tokens)
        tail = BlockRow(block, sequence.blocks[block]) if inside else None
        if tail is not None:
            self.engine.pool.row_region.pin((tail.row,), push_pin(live.key))
        if sequence.slot:
            self.engine.pool.slot_region.pin((sequence.slot,), push_pin(live.key))
        first = tuple(
            FirstToken(choice, token.token_id, token.logprob)
            for choice, token in zip(chunk.choices, tokens, strict=True)
        )
        self.engine.scheduler.remove(sequence)
        sequence.state = State.HANDED_OVER
        timings = live.timings(self.engine.clock())
        live.done_told = True
        self.engine.emit(PrefillDone(live.key, first, tail, sequence.slot, live.counts, timings))

    def ended(self, live: LiveRequest, reason: FinishReason, error: EngineError | None) -> None:
        """PrefillFailed, unless PrefillDone was the terminal event and only the hand-over is given up."""
        if not live.done_told:
            code = {FinishReason.DEADLINE: ErrorCode.DEADLINE_EXCEEDED, FinishReason.CANCELLED: ErrorCode.CANCELLED}
            error = error or EngineError(code.get(reason, ErrorCode.INTERNAL), f"the request ended: {reason.value}")
            self.engine.emit(PrefillFailed(live.key, reason, error))
        live.reasons = dict.fromkeys(range(live.request.n), reason)
        self.engine.ledger.close(live, request_reason(live))

    def _report(self, sequence: Sequence) -> None:
        """Name and pin the blocks whose positions are all computed and that decode does not hold."""
        live = sequence.live
        rows = tuple(
            BlockRow(block, sequence.blocks[block]) for block in range(live.reported_blocks, sequence.committed)
        )
        if rows:
            self.engine.pool.row_region.pin((entry.row for entry in rows), push_pin(live.key))
            live.reported_blocks = sequence.committed
            self.engine.emit(RowsReady(live.key, rows, stream_mark(self.engine.pool.device)))

    def _unpin(self, command: Unpin) -> None:
        pin, pool = push_pin(command.key), self.engine.pool
        slots = pool.slot_region.pinned_by(pin) if command.slot else frozenset()
        missing = set(command.rows) - pool.row_region.pinned_by(pin)
        if missing or (command.slot and not slots):
            raise EngineError(
                ErrorCode.NOT_FOUND,
                f"{command.key} pins no rows {sorted(missing)}{' and no slot' if not slots else ''}",
            )
        try:
            if command.rows:
                pool.row_region.unpin(pin, command.rows)
            if slots:
                pool.slot_region.unpin(pin, slots)
        except NotPinned as error:
            raise EngineError(ErrorCode.NOT_FOUND, str(error)) from error

    def _hand_over_complete(self, live: LiveRequest) -> None:
        sequence = live.sequences[0]
        if sequence.state is not State.HANDED_OVER:
            raise EngineError(ErrorCode.FAILED_PRECONDITION, f"{live.key} is still computing; Cancel ends it")
        self.engine.drop(sequence)
        live.reasons = dict.fromkeys(range(live.request.n), FinishReason.STOP)
        self.engine.ledger.close(live, FinishReason.STOP)
