"""What operators may ask of the prefixes that an engine's pool keeps. Commands of every role (engine/messages.py)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.messages import Command, ReplyT
from headrace.kvcache.keys import Key
from headrace.kvcache.prefix import PrefixCache


class CacheCommand(Command[ReplyT]):
    """Carried out on the pool's prefix cache, between two steps."""

    @abstractmethod
    def run(self, prefix: PrefixCache) -> ReplyT: ...


@dataclass(frozen=True)
class PoolEntries:
    """Findable entries of a pool, or those that were until now."""

    blocks: int
    snapshots: int


@dataclass(frozen=True)
class CountPrefixes(CacheCommand[PoolEntries]):
    """How many blocks and snapshots can be found, used ones included."""

    def run(self, prefix: PrefixCache) -> PoolEntries:
        blocks, snapshots = prefix.count()
        return PoolEntries(blocks, snapshots)


@dataclass(frozen=True)
class ForgetPrefixes(CacheCommand[PoolEntries]):
    """Unbind every key. What requests hold stays theirs, and is free when they release it; nothing is found again."""

    def run(self, prefix: PrefixCache) -> PoolEntries:
        blocks, snapshots = prefix.forget_all()
        return PoolEntries(blocks, snapshots)


@dataclass(frozen=True)
class FindPrefixes(CacheCommand[tuple[tuple[bool, ...], tuple[bool, ...]]]):
    """Which blocks and which snapshots are here, by their keys."""

    blocks: Sequence[Key]
    snapshots: Sequence[Key]

    def run(self, prefix: PrefixCache) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        rows, places = prefix.pool.row_region, prefix.pool.snapshot_region
        return (
            tuple(rows.find(key) is not None for key in self.blocks),
            tuple(places.find(key) is not None for key in self.snapshots),
        )
