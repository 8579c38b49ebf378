"""Keys of the snapshots behind a prompt's blocks, made when somebody asks for them.

A key costs a SHA-256 (2 µs), and nobody asks for those behind blocks that no rank knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from headrace.kvcache.keys import Key, snapshot_key


class SnapshotKeys(Sequence[Key]):
    """`self[i]` is the key of the snapshot at the end of block i."""

    def __init__(self, blocks: Sequence[Key], ring_tokens: int) -> None:
        """`ring_tokens`: of the wire ring, as in every snapshot key (spec/protocol.md, Identity)."""
        self._blocks = blocks
        self._ring_tokens = ring_tokens
        self._made: list[Key] = []

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, at: int) -> Key: ...
    @overload
    def __getitem__(self, at: slice) -> list[Key]: ...
    def __getitem__(self, at: int | slice) -> Key | list[Key]:
        if isinstance(at, slice):
            begin, end, step = at.indices(len(self._blocks))
            self._make(end if step > 0 else begin + 1)
            return self._made[begin:end:step]
        if not -len(self._blocks) <= at < len(self._blocks):
            raise IndexError(at)
        at %= len(self._blocks)
        self._make(at + 1)
        return self._made[at]

    def _make(self, count: int) -> None:
        """Prompts are read from their beginning, so that all before `count` are wanted too."""
        for block in self._blocks[len(self._made) : count]:
            self._made.append(snapshot_key(block, self._ring_tokens))
