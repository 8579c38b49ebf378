"""What the engine offers the tier to keep (engine/tier_writes.py), and under whose name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from headrace.kvcache.entries import TENANT_TAG_BYTES, EntryFieldError, RetentionClass
from headrace.kvcache.keys import KEY_BYTES, Key

if TYPE_CHECKING:
    from headrace.kvcache.transfer.pushes import Ready


@dataclass(frozen=True)
class CacheScope:
    """Whose cache entries a request's are: what every record in the tier is filed under. EntryFieldError for sizes that
    are none."""

    namespace: bytes
    """32 bytes (keys.namespace)."""
    tenant_tag: bytes
    """16 bytes: quotas and erasure; never the tenant's name."""

    def __post_init__(self) -> None:
        for name, value, size in (
            ("namespace", self.namespace, KEY_BYTES),
            ("tenant_tag", self.tenant_tag, TENANT_TAG_BYTES),
        ):
            if len(value) != size:
                raise EntryFieldError(f"{name} has {len(value)} bytes; it must have {size}")


@dataclass(frozen=True)
class WriteRow:
    """A block or snapshot in the pool that the tier is to copy."""

    key: Key
    parent: Key
    """Block: key of the block before it, or the root. Snapshot: key of the block at whose end it was taken."""
    tokens: int
    """Position at its end."""
    place: int
    """Row of `pool.rows`, or place of `pool.snapshots`."""


@dataclass(frozen=True)
class TierWrite:
    """New entries of one sequence, blocks in prefix order. Their places are pinned until TierUnpin names `pin` (L7)."""

    pin: str
    scope: CacheScope
    retention: RetentionClass
    blocks: tuple[WriteRow, ...]
    snapshots: tuple[WriteRow, ...]
    ready: Ready | None = field(default=None, compare=False)
    """On a GPU: passed once the kernels that write the places have run."""


@dataclass(frozen=True)
class PrefixUse:
    """A request reuses a prefix: its blocks in order, then its snapshot, where the layout has them."""

    scope: CacheScope
    retention: RetentionClass | None
    """None: BATCH traffic, which prolongs nothing and writes nothing."""
    root: Key
    """Parent of the first block."""
    blocks: tuple[Key, ...]
    block_tokens: int
    snapshot: Key | None = None

    @property
    def keys(self) -> tuple[Key, ...]:
        return self.blocks if self.snapshot is None else (*self.blocks, self.snapshot)


@dataclass(frozen=True)
class Lacking:
    """Entries of a used prefix that the store does not have: key, parent key, end position."""

    scope: CacheScope
    retention: RetentionClass
    blocks: tuple[tuple[Key, Key, int], ...]
    snapshots: tuple[tuple[Key, Key, int], ...]


TierSink: TypeAlias = Callable[[TierWrite], None]
"""Takes what is to be kept; called on the engine thread, must not block or raise."""
