"""Is this push exact? Everything about handle and rows that can be checked before a byte is posted (L1, L10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.kvcache.handle import ChecksumKind, Handle, PayloadKind
from headrace.kvcache.transfer.errors import PeerLost, PushRefused, Refusal
from headrace.kvcache.transfer.outbound import MoveRoute
from headrace.kvcache.transfer.peers import Peer
from headrace.kvcache.transfer.pieces import is_dense
from headrace.kvcache.transfer.pushes import Push, RowMove
from headrace.kvcache.transfer.regions import MemoryRegion, RegionDescription, RegionRole


@dataclass(frozen=True)
class LocalIdentity:
    """What this process is to its peers."""

    incarnation: str
    rank: int
    layout_fingerprint: bytes | None
    """None for a process without KV."""
    model_fingerprint: bytes


def plan_push(
    handle: Handle,
    moves: Sequence[RowMove],
    own: LocalIdentity,
    peer: Peer | None,
    departed: bool,
    regions: Mapping[str, MemoryRegion],
    gather: bool | None,
) -> tuple[Push, Peer, tuple[MoveRoute, ...]]:
    """A push that may be sent, its receiver and both ends of every move. Raises as check_handle and route_moves."""
    found = check_handle(handle, own, peer, departed)
    routes = route_moves(handle, moves, found, regions, gather)
    nbytes = sum(len(route.move.source_items) * route.source.item_bytes for route in routes)
    return Push(handle, tuple(moves), nbytes), found, routes


def check_handle(handle: Handle, own: LocalIdentity, peer: Peer | None, departed: bool) -> Peer:
    """The connected receiver that the handle names.

    Raises:
        PushRefused: the handle is of another life, model, layout or landing region than what is connected.
        PeerLost: the connection broke at an earlier push.
    """
    if peer is None:
        if departed:
            raise PushRefused(
                Refusal.INCARNATION,
                f"receiver {handle.incarnation} is gone; ask for a reservation of its new incarnation",
            )
        raise PushRefused(
            Refusal.NOT_CONNECTED,
            f"receiver {handle.incarnation} rank {handle.rank} is not connected; connect its description first",
        )
    if peer.lost:
        raise PeerLost(handle.incarnation, "the connection broke")
    description = peer.description
    if handle.model_fingerprint != own.model_fingerprint:
        raise PushRefused(Refusal.MODEL, "the handle names another model; discard it and reserve again")
    if handle.payload is PayloadKind.KV and handle.layout_fingerprint != own.layout_fingerprint:
        raise PushRefused(Refusal.LAYOUT, "the handle names another KV layout; discard it and reserve again")
    if handle.checksum_kind not in description.checksums:
        raise PushRefused(Refusal.CHECKSUM, f"the receiver cannot verify {handle.checksum_kind}; reserve again")
    if not handle.transfer_id or not handle.request_id or handle.attempt < 1:
        raise PushRefused(Refusal.TARGET, "the handle names no transfer, request or attempt; reserve again")
    return peer


def route_moves(
    handle: Handle,
    moves: Sequence[RowMove],
    peer: Peer,
    regions: Mapping[str, MemoryRegion],
    gather: bool | None,
) -> tuple[MoveRoute, ...]:
    """Both ends of every move.

    Raises:
        PushRefused: unknown or out-of-range rows, counts that differ, rows that the handle does not grant, a row named
            twice, sizes that differ, a checksum that the memory cannot have.
    """
    if not moves:
        raise PushRefused(Refusal.SOURCE, "nothing to push; end the transfer instead")
    seen: set[tuple[RegionRole, int]] = set()
    routes: list[MoveRoute] = []
    for move in moves:
        source = _source(move, regions, handle)
        target = _target(move, peer, handle)
        size = handle.row_bytes if move.target is RegionRole.LANDING_ROWS else handle.slot_bytes
        if not size == source.item_bytes == target.item_bytes:
            raise PushRefused(
                Refusal.SIZES,
                f"{move.source} has items of {source.item_bytes} B, the handle {size} B, the receiver's region "
                f"{target.item_bytes} B; all three come from one layout",
            )
        for item in move.target_items:
            if (move.target, item) in seen:
                raise PushRefused(Refusal.CONFLICT, f"{move.target} item {item} is named twice; each is written once")
            seen.add((move.target, item))
        wanted = source.memory != "cpu" if gather is None else gather
        routes.append(MoveRoute(move, source, target, wanted and not is_dense(move.source_items)))
    return tuple(routes)


def _source(move: RowMove, regions: Mapping[str, MemoryRegion], handle: Handle) -> MemoryRegion:
    source = regions.get(move.source)
    if source is None:
        raise PushRefused(Refusal.SOURCE, f"no region {move.source!r} is registered here")
    if not move.source_items or len(move.source_items) != len(move.target_items):
        raise PushRefused(
            Refusal.SOURCE, f"{len(move.source_items)} source and {len(move.target_items)} target items; name pairs"
        )
    if min(move.source_items) < 0 or max(move.source_items) >= source.items:
        raise PushRefused(Refusal.SOURCE, f"{move.source} has items 0 … {source.items - 1}, not {move.source_items}")
    if handle.checksum_kind is ChecksumKind.XXH3_64 and source.memory != "cpu":
        raise PushRefused(
            Refusal.CHECKSUM, f"xxh3_64 is for host memory, {move.source} is {source.memory}: reserve with lanes_64"
        )
    if handle.checksum_kind is ChecksumKind.LANES_64 and source.item_bytes % 4:
        raise PushRefused(Refusal.CHECKSUM, f"lanes_64 needs items of whole 4-byte words, not {source.item_bytes} B")
    return source


def _target(move: RowMove, peer: Peer, handle: Handle) -> RegionDescription:
    if move.target not in (RegionRole.LANDING_ROWS, RegionRole.LANDING_SLOTS):
        raise PushRefused(
            Refusal.TARGET, f"a push lands in landing rows or slots, never in a {move.target} region (L7)"
        )
    regions = zip(peer.description.regions, peer.versions, strict=True)
    found = [each for each in regions if (each[0].payload, each[0].role) == (handle.payload, move.target)]
    if not found:
        raise PushRefused(Refusal.TARGET, f"the receiver has no {move.target} for {handle.payload}")
    region, version = found[0]
    if handle.metadata_version != version:
        raise PushRefused(
            Refusal.METADATA_VERSION,
            f"handle is of landing region {handle.metadata_version}, connected is {version}; connect the description "
            f"that came with the handle",
        )
    granted = set(handle.landing_rows if move.target is RegionRole.LANDING_ROWS else handle.landing_slots)
    foreign = [item for item in move.target_items if item not in granted or not 0 <= item < region.items]
    if foreign:
        raise PushRefused(
            Refusal.TARGET, f"{move.target} items {foreign[:8]} are not granted by handle {handle.transfer_id}"
        )
    return region
