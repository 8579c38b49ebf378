"""A copy on the transfer thread: cut into wire requests, posted, collected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.kvcache.transfer.agent import Memory, WireAgent, device_index
from headrace.kvcache.transfer.copies import Copy, CopyResult, Direction, Span
from headrace.kvcache.transfer.errors import (
    CopyDeadline,
    CopyRefused,
    PeerLost,
    Refusal,
    TransferError,
)
from headrace.kvcache.transfer.peers import Peer
from headrace.kvcache.transfer.pieces import Pieces
from headrace.kvcache.transfer.regions import MemoryRegion, RegionDescription, RegionRole
from headrace.kvcache.transfer.wire_work import WireWork


@dataclass(frozen=True, eq=False)
class CopyRoute:
    """Both ends of a copy, found and checked."""

    peer: Peer
    local: MemoryRegion
    remote: RegionDescription


def route_copy(
    direction: Direction,
    spans: Sequence[Span],
    region: str,
    incarnation: str,
    peer: Peer | None,
    departed: bool,
    regions: Mapping[str, MemoryRegion],
) -> CopyRoute:
    """Everything that can be checked before a byte moves (L1, L10).

    Raises:
        CopyRefused: the peer is not connected or gone, a region has not the role that the direction needs, or a span
            reaches beyond one. PeerLost: the connection broke at an earlier copy or push.
    """
    if peer is None:
        if departed:
            raise CopyRefused(Refusal.INCARNATION, f"{incarnation} is gone; a restarted peer has a new incarnation")
        raise CopyRefused(Refusal.NOT_CONNECTED, f"{incarnation} is not connected; connect its description first")
    if peer.lost:
        raise PeerLost(incarnation, "the connection broke")
    reads = direction is Direction.READ
    local_role, remote_role = (RegionRole.FETCHED, RegionRole.READABLE)[:: 1 if reads else -1]
    local = regions.get(region)
    if local is None or local.role is not local_role:
        raise CopyRefused(Refusal.SOURCE, f"no {local_role} region {region!r} is registered here")
    remote = next((each for each in peer.description.regions if each.role is remote_role), None)
    if remote is None:
        raise CopyRefused(Refusal.TARGET, f"the peer has no {remote_role} region")
    if not spans:
        raise CopyRefused(Refusal.SIZES, "nothing to copy")
    for span in spans:
        here, there = local.items * local.item_bytes, remote.items * remote.item_bytes
        if span.length < 1 or span.local < 0 or span.local + span.length > here:
            raise CopyRefused(Refusal.SOURCE, f"{span} is not inside {region}, which has {here} bytes")
        if span.remote < 0 or span.remote + span.length > there:
            raise CopyRefused(Refusal.TARGET, f"{span} is not inside the peer's {remote_role}, which has {there} bytes")
    return CopyRoute(peer, local, remote)


class SpanCopy(WireWork[Pieces, CopyResult]):
    """State machine of one copy."""

    def __init__(self, copy: Copy, route: CopyRoute, *, deadline: float, timeout_s: float) -> None:
        super().__init__(copy, "copy", deadline=deadline)
        self.copy = copy
        self.route = route
        self._timeout_s = timeout_s

    def plan(self, batch_bytes: int) -> None:
        """Cut the spans into wire requests of about batch_bytes."""
        batch: list[Span] = []
        size = 0
        for span in self.copy.spans:
            if batch and size + span.length > batch_bytes:
                self._batches.append(self._pieces(batch))
                batch, size = [], 0
            batch.append(span)
            size += span.length
        self._batches.append(self._pieces(batch))

    def step(self, agent: WireAgent, window: int, now: float) -> bool:
        """Advance without waiting. True if anything moved."""
        moved = self._collect(agent)
        moved |= self._expire(now)
        if self._batches and len(self._in_flight) < window:
            self._post(agent, now)
            moved = True
        return self._finished() or moved

    # --- inside ------------------------------------------------------------------------------------------------

    def _pieces(self, spans: list[Span]) -> Pieces:
        here, there = self.route.local.base.data_ptr(), self.route.remote.base_address
        return Pieces(
            np.asarray([here + span.local for span in spans], dtype=np.uint64),
            np.asarray([there + span.remote for span in spans], dtype=np.uint64),
            np.asarray([span.length for span in spans], dtype=np.uint64),
            first=0,
            count=len(spans),
        )

    def _post(self, agent: WireAgent, now: float) -> None:
        if not self._started:
            self._started = now
        local, remote = self.route.local, self.route.remote
        try:
            request, complete = agent.post(
                self.route.peer.description.agent_name,
                self._batches[0],
                Memory(local.memory, device_index(local.base)),
                Memory(remote.memory, remote.device_id),
                b"",
                reads=self.copy.direction is Direction.READ,
            )
        except TransferError as error:
            self.cut(error)
            return
        self._posted(agent, request, None, complete=complete)

    def _late(self) -> TransferError:
        return CopyDeadline(self.copy.peer, self._timeout_s)

    def _result(self, seconds: float) -> CopyResult:
        wire = self.route.peer.wire(self.route.local.memory, self.route.remote.memory)
        return CopyResult(self.copy.nbytes, wire, seconds)
