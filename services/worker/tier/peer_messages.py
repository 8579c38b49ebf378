"""Entries of the host tier: wire form ↔ kvcache's dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.kvcache.entries import EntryFieldError, EntryInfo, EntryKind, RetentionClass
from headrace.kvcache.host.peers import RemoteEntry
from headrace.kvcache.host.types import Pinned
from headrace.kvcache.keys import KEY_BYTES, Key
from headrace.services.runtime.errors import InvalidArgument
from headrace.v1 import cache_pb2, common_pb2, events_pb2

MAX_KEYS: Final = 1 << 14
"""Of one call: two million tokens in blocks of 128."""

_KINDS: Final = {EntryKind.BLOCK: events_pb2.ENTRY_KIND_BLOCK, EntryKind.SNAPSHOT: events_pb2.ENTRY_KIND_SNAPSHOT}
_KIND_OF: Final[dict[int, EntryKind]] = {number: kind for kind, number in _KINDS.items()}


def keys_from_wire(keys: Sequence[bytes]) -> list[Key]:
    """Raises InvalidArgument."""
    if len(keys) > MAX_KEYS or any(len(key) != KEY_BYTES for key in keys):
        raise InvalidArgument(f"at most {MAX_KEYS} keys of {KEY_BYTES} bytes each are needed", field="keys")
    return list(keys)


def leased_to_wire(pinned: Pinned) -> cache_pb2.LeasedEntry:
    """An entry as its reader is told of it."""
    info = pinned.info
    is_agent = info.retention is RetentionClass.AGENT
    return cache_pb2.LeasedEntry(
        key=info.key,
        kind=_KINDS[info.kind],
        namespace=info.namespace,
        parent_key=info.parent,
        tokens=info.tokens,
        length=info.length,
        digest=info.digest,
        retention=common_pb2.TRAFFIC_CLASS_AGENT if is_agent else common_pb2.TRAFFIC_CLASS_CHAT,
        pinned=info.retention is RetentionClass.PINNED,
        tenant_tag=info.tenant_tag,
        offset=pinned.offset,
        generation=pinned.generation,
    )


def leased_from_wire(wire: cache_pb2.LeasedEntry) -> RemoteEntry | None:
    """None for what no entry could be: it is not asked for then (L13)."""
    kind = _KIND_OF.get(wire.kind)
    if kind is None:
        return None
    retention = RetentionClass.AGENT if wire.retention == common_pb2.TRAFFIC_CLASS_AGENT else RetentionClass.CHAT
    try:
        info = EntryInfo(
            key=wire.key,
            kind=kind,
            namespace=wire.namespace,
            parent=wire.parent_key,
            tokens=wire.tokens,
            length=wire.length,
            digest=wire.digest,
            retention=RetentionClass.PINNED if wire.pinned else retention,
            tenant_tag=wire.tenant_tag,
        )
    except EntryFieldError:
        return None
    return RemoteEntry(info, wire.offset, wire.generation)
