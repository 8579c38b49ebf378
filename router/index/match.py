"""One prompt against the index: how far each rank can go alone, and with what others can lend it (L4).

Twice the same: a loop for short prompts with few holders, where every call of numpy would cost more than the work, and
columns for the rest. `router/index/twin.py` says plainly what both answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from headrace.router.index.base import Blocks, HolderTier, PrefixMatch, StorePrefix
from headrace.router.index.chains import chain_lengths, last_end, last_ends, leading
from headrace.router.index.runs import RUN, TIER_BITS, HolderRuns, Words, run_class

_DEVICE: Final = int(HolderTier.DEVICE)
_HOST: Final = int(HolderTier.HOST)
FEW_BLOCKS: Final = 32
_FEW_HOLDERS: Final = 3
"""log₂ of the most holders of a block in the loop."""
Look: TypeAlias = Callable[[int], Words]
"""Words of the snapshots behind the first so many blocks."""


def many_holders(word: int) -> bool:
    """Whether a block's holders are too many for the loop."""
    return word >= RUN and run_class(word) > _FEW_HOLDERS


def match_few(
    words: Sequence[int], snapshots: Look | None, store: StorePrefix, runs: HolderRuns, ranks: int
) -> PrefixMatch:
    """`words`: who holds each leading block, as far as anybody can go."""
    device: dict[int, int] = {}
    local: dict[int, int] = {}
    mixed: dict[int, int] = {}
    alone: list[int] | None = None
    """Ranks that have every block that cannot be lent, up to here; None: so far all can be."""
    shared = end = 0
    for position, held in enumerate(map(runs.holders, words)):
        lent = position < store.blocks
        for entry in held:
            rank = entry >> TIER_BITS
            if local.get(rank, 0) == position:
                local[rank] = position + 1
            if entry & _DEVICE and device.get(rank, 0) == position:
                device[rank] = position + 1
            lent = lent or bool(entry & _HOST)
        if not lent:
            here = [entry >> TIER_BITS for entry in held]
            alone = here if alone is None else [rank for rank in alone if rank in here]
        end = position + 1
        if alone is None:
            shared = end
        for rank in alone or ():
            mixed[rank] = end
        if alone == []:
            break
    columns: tuple[dict[int, int], ...] = (device, local, mixed)
    if snapshots is not None:
        longest = max(shared, *device.values(), *local.values(), *mixed.values(), 0)
        at = [runs.holders(word) for word in snapshots(longest).tolist()]
        lent_at = [
            position + 1
            for position, held in enumerate(at)
            if position + 1 in store.snapshots or any(entry & _HOST for entry in held)
        ]
        lent_behind = {rank: max((each for each in lent_at if each <= far), default=0) for rank, far in mixed.items()}
        ends: tuple[dict[int, int], ...] = ({}, {}, {rank: far for rank, far in lent_behind.items() if far})
        for position, held in enumerate(at, 1):
            for entry in held:
                rank = entry >> TIER_BITS
                for chain, best, tiers in zip(columns, ends, (_DEVICE, _DEVICE | _HOST, _DEVICE | _HOST), strict=True):
                    far = max(chain.get(rank, 0), shared) if chain is mixed else chain.get(rank, 0)
                    if entry & tiers and position <= far:
                        best[rank] = max(best.get(rank, 0), position)
        columns = ends
        shared = max((each for each in lent_at if each <= shared), default=0)
    on_device = _column(columns[0], ranks)
    own = on_device if columns[0] == columns[1] else _column(columns[1], ranks)
    further = any(end > max(columns[1].get(rank, 0), shared) for rank, end in columns[2].items())
    return PrefixMatch(on_device, own, shared, _column(columns[2], ranks, shared) if further else None)


def _column(lengths: dict[int, int], ranks: int, least: int = 0) -> Blocks:
    column = np.full(ranks, least, np.int32) if least else np.zeros(ranks, np.int32)
    for rank, length in lengths.items():
        if length > least:
            column[rank] = length
    return column


def match_many(words: Words, snapshots: Look | None, store: StorePrefix, runs: HolderRuns, ranks: int) -> PrefixMatch:
    """The same for any number of blocks and holders."""
    positions, held = runs.pairs(words)
    holders = (held >> TIER_BITS).astype(np.int64)
    hosted = (held & _HOST) != 0
    lent = np.zeros(len(words), np.bool_)
    lent[: store.blocks] = True
    lent[positions[hosted]] = True
    shared = leading(lent)
    local = chain_lengths(positions, holders, ranks)
    device = local
    if hosted.any():
        own = (held & _DEVICE) != 0
        device = chain_lengths(positions[own], holders[own], ranks)
    mixed = _mixed(positions, holders, lent, local, ranks)
    if snapshots is None:
        return PrefixMatch(device, local, shared, _further(mixed, local, shared))
    longest = int(max(shared, mixed.max(initial=0)))
    positions, held = runs.pairs(snapshots(longest))
    holders = (held >> TIER_BITS).astype(np.int64)
    own = (held & _DEVICE) != 0
    lent = np.zeros(longest, np.bool_)
    lent[[end - 1 for end in store.snapshots if end <= longest]] = True
    lent[positions[(held & _HOST) != 0]] = True
    ends = np.concatenate(([0], np.where(lent, np.arange(1, longest + 1), 0)))
    behind = np.maximum.accumulate(ends).astype(np.int32)
    """The last snapshot that can be lent, at most so many blocks in."""
    shared = last_end(lent, shared)
    mixed = np.maximum(last_ends(positions, holders, mixed), behind[mixed])
    own_ends = last_ends(positions, holders, local)
    same = device is local and own.all()
    on_device = own_ends if same else last_ends(positions[own], holders[own], device)
    return PrefixMatch(on_device, own_ends, shared, _further(mixed, own_ends, shared))


def _further(mixed: Blocks, local: Blocks, shared: int) -> Blocks | None:
    """`mixed` where it says more than the others."""
    return mixed if mixed is not local and bool((mixed > np.maximum(local, shared)).any()) else None


def _mixed(positions: Blocks, holders: np.ndarray, lent: np.ndarray, local: Blocks, ranks: int) -> Blocks:
    """How far each rank gets with blocks of its own and blocks that can be lent: up to the first that is neither."""
    scarce = (~lent).nonzero()[0]
    if len(scarce) == len(lent):
        return local
    ends = np.append(scarce, len(lent)).astype(np.int32)
    if len(scarce) == 0:
        return np.full(ranks, len(lent), np.int32)
    number = np.cumsum(~lent, dtype=np.int32) - 1
    only = ~lent[positions]
    return ends[chain_lengths(number[positions[only]], holders[only], ranks)]


def words_of(keys: Sequence[bytes], look: Callable[[Sequence[bytes]], Words], count: int, stored: int) -> Words:
    """Words of leading blocks until one that nobody has and that is not among the `stored` first of the store: no
    prefix goes beyond it. A prompt that is known in its beginning only is not looked up to its end."""
    words = look(keys[: min(count, _FIRST_LOOK)])
    if len(words) < count and words[stored:].all():
        words = np.concatenate((words, look(keys[len(words) : count])))
    unknown = (words[stored:] == 0).nonzero()[0]
    return words[: stored + int(unknown[0])] if len(unknown) else words


_FIRST_LOOK: Final = 64
