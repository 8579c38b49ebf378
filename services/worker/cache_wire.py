"""Cache events between the log's classes and the wire's messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.kvcache.cache_events import BucketDropped, CacheChange, Cleared, NamespaceDropped, Removed, Stored, Tier
from headrace.kvcache.entries import EntryKind
from headrace.kvcache.event_log import Numbered
from headrace.kvcache.keys import KEY_BYTES
from headrace.services.runtime.errors import InvalidArgument
from headrace.v1 import control_pb2, events_pb2

KINDS: Final = {EntryKind.BLOCK: events_pb2.ENTRY_KIND_BLOCK, EntryKind.SNAPSHOT: events_pb2.ENTRY_KIND_SNAPSHOT}
TIERS: Final = {
    Tier.DEVICE: control_pb2.CACHE_TIER_DEVICE,
    Tier.HOST: control_pb2.CACHE_TIER_HOST,
    Tier.STORE: control_pb2.CACHE_TIER_STORE,
}


def event_to_wire(event: Numbered) -> events_pb2.CacheEvent:
    """One numbered change. Keys only, never token ids (L25)."""
    wire = events_pb2.CacheEvent(sequence=event.sequence)
    match event.change:
        case Stored():
            wire.stored.CopyFrom(stored_to_wire(event.change))
        case Removed(kind, tier, keys):
            wire.removed.CopyFrom(events_pb2.Removed(kind=KINDS[kind], tier=TIERS[tier], keys=keys))
        case BucketDropped(bucket):
            wire.bucket_dropped.bucket = bucket
        case NamespaceDropped(namespace):
            wire.namespace_dropped.namespace = namespace
        case Cleared(tier):
            wire.cleared.tier = TIERS[tier]
    return wire


def stored_to_wire(stored: Stored) -> events_pb2.Stored:
    """Entries of an event or of a snapshot."""
    return events_pb2.Stored(
        kind=KINDS[stored.kind],
        tier=TIERS[stored.tier],
        keys=stored.keys,
        parent_key=stored.parent or b"",
        end_tokens=stored.end_tokens,
        entry_bytes=stored.entry_bytes,
        bucket=stored.bucket,
    )


def change_from_wire(wire: events_pb2.CacheEvent) -> CacheChange | None:
    """The change of an event; None for one that this version does not know: skip it. Raises InvalidArgument."""
    match wire.WhichOneof("change"):
        case "stored":
            return stored_from_wire(wire.stored)
        case "removed":
            removed = wire.removed
            return Removed(_kind(removed.kind), tier_from_wire(removed.tier), _keys(removed.keys))
        case "bucket_dropped":
            return BucketDropped(wire.bucket_dropped.bucket)
        case "namespace_dropped":
            return NamespaceDropped(wire.namespace_dropped.namespace)
        case "cleared":
            return Cleared(tier_from_wire(wire.cleared.tier))
        case _:
            return None


def stored_from_wire(wire: events_pb2.Stored) -> Stored:
    """Raises InvalidArgument for what no worker sends."""
    return Stored(
        _kind(wire.kind),
        tier_from_wire(wire.tier),
        _keys(wire.keys),
        wire.parent_key or None,
        wire.end_tokens,
        wire.entry_bytes,
        wire.bucket,
    )


def tier_from_wire(wire: int) -> Tier:
    """Raises InvalidArgument."""
    try:
        return Tier(wire)
    except ValueError:
        raise InvalidArgument(f"{wire} is no cache tier", field="tier") from None


def _kind(wire: int) -> EntryKind:
    try:
        return EntryKind(wire)
    except ValueError:
        raise InvalidArgument(f"{wire} is no kind of entry", field="kind") from None


def _keys(wire: Iterable[bytes]) -> tuple[bytes, ...]:
    keys = tuple(wire)
    if any(len(key) != KEY_BYTES for key in keys):
        raise InvalidArgument(f"a key has {KEY_BYTES} bytes", field="keys")
    return keys
