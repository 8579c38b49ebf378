"""The sending side on the transfer thread: one push's batches, and one transfer's record until its terminal notice."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from headrace.kvcache.checksum import checksums
from headrace.kvcache.handle import Handle
from headrace.kvcache.transfer.agent import Memory, WireAgent, device_index
from headrace.kvcache.transfer.errors import PushDeadline, TransferError
from headrace.kvcache.transfer.peers import Peer
from headrace.kvcache.transfer.pieces import item_addresses, merge
from headrace.kvcache.transfer.pushes import Outcome, Push, PushResult, Ready, RowMove, TerminalNotice
from headrace.kvcache.transfer.regions import MemoryRegion, RegionDescription
from headrace.kvcache.transfer.staging import Staging, StagingSlot
from headrace.kvcache.transfer.wire import encode_notice
from headrace.kvcache.transfer.wire_work import WireWork

TransferKey = tuple[str, int, str]
"""(receiver's incarnation, rank, transfer id)."""


@dataclass(eq=False)
class Outgoing:
    """One transfer as its sender knows it, from the first push (or ``end``) to the terminal notice."""

    handle: Handle
    active: int = 0
    """Pushes not yet terminal."""
    written: set[tuple[str, int]] = field(default_factory=set)
    """(role, item) pushed so far: each landing row is written once."""
    landed_bytes: int = 0
    failed: bool = False
    ended: Outcome | None = None
    """Set when no more pushes are accepted."""
    notified: bool = False
    """The terminal notice went out behind the last write."""
    waiting: list[Future[None]] = field(default_factory=list)

    @property
    def key(self) -> TransferKey:
        return self.handle.incarnation, self.handle.rank, self.handle.transfer_id

    def notice(self, more_bytes: int = 0) -> TerminalNotice:
        failed = self.failed or self.ended is not Outcome.OK
        return TerminalNotice(
            transfer_id=self.handle.transfer_id,
            request_id=self.handle.request_id,
            attempt=self.handle.attempt,
            generation=self.handle.generation,
            outcome=Outcome.FAILED if failed else Outcome.OK,
            nbytes=self.landed_bytes + more_bytes,
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """Items [first, first + count) of a move: one wire request."""

    move: int
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class MoveRoute:
    """A move with both of its regions found."""

    move: RowMove
    source: MemoryRegion
    target: RegionDescription
    gather: bool


class OutboundPush(WireWork[Batch, PushResult]):
    """State machine of one push."""

    def __init__(
        self,
        push: Push,
        record: Outgoing,
        peer: Peer,
        routes: tuple[MoveRoute, ...],
        *,
        deadline: float,
        timeout_s: float,
        last: bool,
        ready: Ready | None = None,
    ) -> None:
        super().__init__(push, "push", deadline=deadline)
        self.push = push
        self.record = record
        self.peer = peer
        self.routes = routes
        self.last = last
        self._ready = ready
        self._timeout_s = timeout_s
        self._sums: list[list[int]] = [[] for _ in routes]
        self._descriptors = 0

    def plan(self, staging: Staging, batch_bytes: int) -> None:
        """Cut the moves into wire requests."""
        for index, route in enumerate(self.routes):
            size = route.source.item_bytes
            step = staging.items_per_slot(size) if route.gather else max(1, batch_bytes // size)
            count = len(route.move.source_items)
            self._batches.extend(Batch(index, first, min(step, count - first)) for first in range(0, count, step))

    def step(self, agent: WireAgent, staging: Staging, window: int, now: float) -> bool:
        """Advance without waiting: collect what is complete, post at most one batch. True if anything moved."""
        moved = self._collect(agent)
        moved |= self._expire(now)
        if self._batches and self._may_post(window):
            with staging.stream(self.routes[self._batches[0].move].source.base.device):
                moved |= self._post(agent, staging, now)
        if self._finished():
            if self._error is not None:
                self.record.notified = False
            return True
        return moved

    # --- inside ------------------------------------------------------------------------------------------------

    def _may_post(self, window: int) -> bool:
        if self._ready is not None:
            if not self._ready.query():
                return False
            self._ready = None
        return len(self._in_flight) < window and not (self._is_final and self._in_flight)

    @property
    def _is_final(self) -> bool:
        """The next batch is the transfer's last write, so that the notice can ride behind it."""
        return self.last and len(self._batches) == 1 and self.record.active == 1

    def _post(self, agent: WireAgent, staging: Staging, now: float) -> bool:
        batch = self._batches[0]
        route = self.routes[batch.move]
        chosen = slice(batch.first, batch.first + batch.count)
        items = route.move.source_items[chosen]
        size = route.source.item_bytes
        slot: StagingSlot | None = None
        if route.gather:
            slot = staging.gather(route.source.base, items, self.push.handle.checksum_kind)
            if slot is None:
                return False
            rows, indexes = slot.rows(batch.count, size), tuple(range(batch.count))
        else:
            rows, indexes = route.source.base, items
        pieces = merge(
            item_addresses(rows.data_ptr(), size, indexes),
            item_addresses(route.target.base_address, size, route.move.target_items[chosen]),
            size,
        )
        notice = b""
        if self._is_final and not self.record.failed and self._error is None:
            notice = encode_notice(self.record.notice(more_bytes=self.push.nbytes))
        if not self._started:
            self._started = now
        try:
            request, complete = agent.post(
                self.peer.description.agent_name,
                pieces,
                Memory(rows.device.type, device_index(rows)),
                Memory(route.target.memory, route.target.device_id),
                notice,
            )
        except TransferError as error:
            if slot is not None:
                slot.free()
            self.cut(error)
            return True
        self._descriptors += len(pieces)
        # What is not gathered is summed behind the post, which overlaps with the wire; the bytes are pinned and final.
        sums = slot.sums if slot is not None else checksums(rows, indexes, self.push.handle.checksum_kind)
        self._sums[batch.move].extend(sums)
        if notice:
            self.record.notified = True
        self._posted(agent, request, slot, complete=complete)
        return True

    def _late(self) -> TransferError:
        return PushDeadline(self.push.transfer_id, self._timeout_s)

    def _result(self, seconds: float) -> PushResult:
        wires = {self.peer.wire(route.source.memory, route.target.memory) for route in self.routes}
        return PushResult(
            transfer_id=self.push.transfer_id,
            checksums=tuple(tuple(sums) for sums in self._sums),
            nbytes=self.push.nbytes,
            descriptors=self._descriptors,
            transport="+".join(sorted(wires)),
            seconds=seconds,
        )
