"""A byte budget becomes counts of rows, slots and snapshots. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.settings import EngineSettings
from headrace.kvcache.layout import KVLayout


class TooLittleMemory(ValueError):
    """The budget holds no useful pool; the message says what it takes."""


@dataclass(frozen=True)
class PoolSizes:
    """Counts for KVPool, the reserved row 0 and slot 0 included."""

    num_rows: int
    num_slots: int
    num_snapshots: int

    def bytes(self, layout: KVLayout) -> int:
        return (
            self.num_rows * layout.block_bytes
            + self.num_slots * layout.slot_bytes
            + self.num_snapshots * layout.snapshot_bytes
        )


def pool_sizes(layout: KVLayout, settings: EngineSettings, context_tokens: int) -> PoolSizes:
    """Slots for `max_sequences`, a share of the rest for snapshots, rows from what remains.

    Never more rows than `max_sequences` full contexts could use. Raises TooLittleMemory when not even two rows per
    sequence would fit.
    """
    num_slots = settings.max_sequences + 1 if layout.slot_bytes else 0
    rest = settings.kv_bytes - num_slots * layout.slot_bytes
    num_snapshots = int(rest * settings.snapshot_fraction) // layout.snapshot_bytes if layout.snapshot_bytes else 0
    rest -= max(num_snapshots, 0) * layout.snapshot_bytes
    most = settings.max_sequences * layout.blocks_for(context_tokens + 1) + 1
    num_rows = min(rest // layout.block_bytes, most)
    least = 2 * settings.max_sequences + 1
    if num_rows < least:
        needed = least * layout.block_bytes + num_slots * layout.slot_bytes
        raise TooLittleMemory(
            f"kv_bytes {settings.kv_bytes} gives {max(num_rows, 0)} rows of {layout.block_bytes} bytes; "
            f"max_sequences {settings.max_sequences} needs at least {least} ({needed} bytes with slots): "
            "raise kv_bytes or lower max_sequences"
        )
    return PoolSizes(num_rows, num_slots, max(num_snapshots, 0))
