"""Where prompts part: positions at which a snapshot lets later prompts reuse what several have in common.

Blocks are kept densely, snapshots sparsely (spec/kv_tier.md), and where a layout has snapshots a prefix is usable only
at one. When a prompt follows a known chain of blocks and leaves it while the chain goes on, others will leave it there
too: a system prompt that many share, a document with many questions. So that boundary goes into `snapshot_at`.

Keys are salted by tenant, so that chains of two tenants never meet here either. For one thread (the event loop's);
O(blocks) per request; bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from headrace.kvcache.keys import Key

KEPT_BYTES = 16
"""Of a key: enough to tell blocks apart, and a wrong match would cost one needless snapshot."""


class Forks:
    """Remembers the block chains of recent prompts, the least recently used blocks leaving first."""

    def __init__(self, max_blocks: int, min_blocks: int = 2) -> None:
        """`min_blocks`: shorter shared prefixes are not worth a snapshot. A block takes about 250 bytes here."""
        if max_blocks < 0 or min_blocks < 1:
            raise ValueError(f"max_blocks {max_blocks} must not be negative and min_blocks {min_blocks} at least 1")
        self._max_blocks = max_blocks
        self._min_blocks = min_blocks
        self._continued: OrderedDict[bytes, bool] = OrderedDict()
        """Known blocks, in order of use; whether a known prompt went on behind them."""

    def __len__(self) -> int:
        return len(self._continued)

    def visit(self, keys: Sequence[Key]) -> int:
        """Remember a prompt by the keys of its full blocks. Returns after how many of them it leaves a known chain that
        goes on otherwise; 0 for a new chain, one that only extends a known prompt, or a repeated one."""
        blocks = [key[:KEPT_BYTES] for key in keys]
        known = 0
        for block in blocks:
            if block not in self._continued:
                break
            known += 1
        leaves = self._min_blocks <= known < len(blocks) and self._continued[blocks[known - 1]]
        self._remember(blocks)
        return known if leaves else 0

    def _remember(self, blocks: Sequence[bytes]) -> None:
        """Suffix first, so that of a chain the end is forgotten before the beginning. A prompt longer than all that can
        be kept is remembered by its beginning."""
        kept = blocks[: self._max_blocks]
        for index in range(len(kept) - 1, -1, -1):
            block = kept[index]
            goes_on = index + 1 < len(blocks) or self._continued.get(block, False)
            self._continued[block] = goes_on
            self._continued.move_to_end(block)
        while len(self._continued) > self._max_blocks:
            self._continued.popitem(last=False)
