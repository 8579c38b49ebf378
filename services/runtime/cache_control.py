"""The cache calls of ControlService, as one process answers them for its own tiers (spec/kv_tier.md).

`CacheControls` names the tiers that a process has; whoever makes them fills it in. Blocking work of a store runs on
threads. Every change is logged: an operator's call leaves a line with the request's id on every replica it reached.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence, Set
from typing import Final, TypeVar

from headrace.kvcache.cache_events import Tier
from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.keys import KEY_BYTES, Key
from headrace.kvcache.store.base import Store, StoredEntry, StoreError
from headrace.services.runtime import logs
from headrace.services.runtime.cache_drops import drop_in_host, drop_in_store, scope_of, tier_drop, wanted_tiers
from headrace.services.runtime.cache_numbers import host_stats, store_place, store_stats
from headrace.services.runtime.cache_operations import CacheControls, Metadata
from headrace.services.runtime.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unimplemented
from headrace.v1 import control_pb2

T = TypeVar("T")
_log = logs.get(__name__)
FIND_SECONDS: Final = 2.0
"""Deadline of an index lookup for an operator."""
PROGRESS_SECONDS: Final = 0.25
"""Least time between two progress messages of a scrub."""
SETTLE_SECONDS: Final = 5.0
"""Longest wait for copies under way before a drop."""
MAX_FIND_KEYS: Final = 1 << 20


class ProcessCaches:
    """CacheOperations over one process's tiers."""

    def __init__(self, controls: CacheControls) -> None:
        self._controls = controls
        self._scrubbing = False

    # --- numbers -----------------------------------------------------------------------------------------------

    async def stats(self, request: control_pb2.CacheStatsRequest, metadata: Metadata) -> control_pb2.CacheStatsResponse:
        """See control.proto."""
        controls = self._controls
        tiers: list[control_pb2.TierStats] = []
        if controls.device is not None:
            tiers.append(await controls.device.stats())
        if controls.host is not None:
            tiers.append(host_stats(controls.host))
        if controls.store is not None:
            tiers.append(await asyncio.to_thread(store_stats, controls.store))
        counted = controls.tokens()
        for tier in tiers:
            tokens = counted.get(Tier(tier.tier))
            if tokens is not None:
                tier.hit_tokens, tier.lookup_tokens = tokens.hit, tokens.looked_up
        return control_pb2.CacheStatsResponse(tiers=tiers)

    # --- dropping ----------------------------------------------------------------------------------------------

    async def clear(self, request: control_pb2.ClearCacheRequest, metadata: Metadata) -> control_pb2.ClearCacheResponse:
        """See control.proto. The lowest tier goes first, so that nothing is loaded from it into one that is clear."""
        scope = scope_of(request)
        tiers = wanted_tiers(request.tiers)
        await self._settle()
        drops: list[control_pb2.TierDrop] = []
        store, host, device = self._controls.store, self._controls.host, self._controls.device
        if store is not None and Tier.STORE in tiers:
            dropped = await _off_loop(lambda: drop_in_store(store, request))
            dropped.store = await asyncio.to_thread(store.identity)
            drops.append(dropped)
        if host is not None and Tier.HOST in tiers:
            drops.append(drop_in_host(host, request))
        if device is not None and Tier.DEVICE in tiers:
            blocks, snapshots = await device.forget()
            drops.append(tier_drop(Tier.DEVICE, blocks, snapshots))
        response = control_pb2.ClearCacheResponse(
            blocks=sum(drop.blocks for drop in drops), snapshots=sum(drop.snapshots for drop in drops), drops=drops
        )
        _log.warning(
            "cache cleared",
            scope=scope,
            tiers=[tier.name.lower() for tier in tiers],
            blocks=response.blocks,
            snapshots=response.snapshots,
        )
        return response

    # --- prompts -----------------------------------------------------------------------------------------------

    async def find(self, request: control_pb2.FindCacheRequest, metadata: Metadata) -> control_pb2.FindCacheResponse:
        """See control.proto; keys only."""
        blocks, snapshots = _keys(request)
        found = [control_pb2.FoundBlock(key=key) for key in blocks]
        controls = self._controls
        if controls.device is not None:
            device = control_pb2.CachePlace(tier=control_pb2.CACHE_TIER_DEVICE)
            here = await controls.device.find(blocks, snapshots)
            _add(found, [device if one else None for one in here[0]], [device if one else None for one in here[1]])
        if controls.host is not None:
            host = control_pb2.CachePlace(tier=control_pb2.CACHE_TIER_HOST)
            kept = controls.host.lookup([*blocks, *snapshots], math.inf)
            places = [host if one else None for one in kept]
            _add(found, places[: len(blocks)], places[len(blocks) :])
        if controls.store is not None:
            store = controls.store
            deadline = time.monotonic() + FIND_SECONDS
            rows = await _off_loop(lambda: store.find([*blocks, *snapshots], deadline))
            stored = [None if row is None else store_place(row) for row in rows]
            _add(found, stored[: len(blocks)], stored[len(blocks) :])
        return control_pb2.FindCacheResponse(blocks=found)

    async def pin(self, request: control_pb2.PinCacheRequest, metadata: Metadata) -> control_pb2.PinCacheResponse:
        """See control.proto; keys only."""
        store = self._store()
        if not store.capabilities.pin:
            raise Unimplemented("of", "this store engine cannot pin entries")
        blocks, snapshots = _keys(request)
        asked = [*blocks, *snapshots]

        def held(kept: Callable[[StoredEntry], bool]) -> list[Key]:
            """Keys of the longest usable prefix of such entries, blocks first."""
            rows = store.find(asked, time.monotonic() + FIND_SECONDS)
            there = {key for key, row in zip(asked, rows, strict=True) if row is not None and kept(row)}
            end = usable_blocks(blocks, snapshots, there)
            return [*blocks[:end], *(key for key in snapshots[:end] if key in there)]

        wanted = await _off_loop(lambda: held(lambda row: True))
        pinned = await _off_loop(lambda: store.pin(wanted)) if wanted else 0
        lasting = await _off_loop(lambda: held(lambda row: row.retention is RetentionClass.PINNED)) if pinned else []
        usable = len(set(blocks).intersection(lasting))
        _log.warning("cache pinned", asked=len(asked), pinned=pinned, usable_blocks=usable)
        return control_pb2.PinCacheResponse(
            pinned=pinned, asked=len(asked), usable_blocks=usable, needs_snapshots=bool(snapshots)
        )

    # --- upkeep ------------------------------------------------------------------------------------------------

    async def verify(
        self, request: control_pb2.VerifyCacheRequest, metadata: Metadata
    ) -> AsyncIterator[control_pb2.VerifyCacheResponse]:
        """See control.proto. One at a time; it goes on in its thread when the caller leaves."""
        store = self._store()
        if self._scrubbing:
            raise ResourceExhausted("a scrub is running on this replica; repeat when it is done", retry_after_s=30.0)
        self._scrubbing = True
        try:
            stats = await asyncio.to_thread(store.stats)
        except BaseException:
            self._scrubbing = False
            raise
        expected = stats.blocks + stats.snapshots
        done = [0]

        def told(checked: int) -> None:
            done[0] = checked

        work = asyncio.ensure_future(_off_loop(lambda: store.verify(told)))
        work.add_done_callback(lambda _: setattr(self, "_scrubbing", False))
        while not work.done():
            await asyncio.wait({work}, timeout=PROGRESS_SECONDS)
            if not work.done():
                yield control_pb2.VerifyCacheResponse(checked=done[0], expected=max(expected, done[0]))
        report = work.result()
        _log.info("cache verified", checked=report.checked, bad=len(report.bad), dangling=report.dangling)
        yield control_pb2.VerifyCacheResponse(
            checked=report.checked,
            expected=max(expected, report.checked),
            done=True,
            bad=[control_pb2.BadEntry(key=key, cause=miss.value) for key, miss in report.bad],
            missing_in_index=report.missing_in_index,
            dangling=report.dangling,
        )

    async def collect(
        self, request: control_pb2.CollectCacheRequest, metadata: Metadata
    ) -> control_pb2.CollectCacheResponse:
        """See control.proto."""
        report = await _off_loop(self._store().collect)
        _log.info("cache collected", freed_bytes=report.freed_bytes, refused=report.refused)
        return control_pb2.CollectCacheResponse(
            expired_buckets=report.expired_buckets,
            evicted_segments=report.evicted_segments,
            adopted_segments=report.adopted_segments,
            freed_bytes=report.freed_bytes,
            refused=report.refused,
        )

    async def _settle(self) -> None:
        """What was offered before the drop is dropped with the rest; what running requests offer later is not."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not self._controls.settled() and time.monotonic() < deadline:  # noqa: ASYNC110 - a writer has no event
            await asyncio.sleep(0.01)

    def _store(self) -> Store:
        if self._controls.store is None:
            raise FailedPrecondition("this process has no store; set cache.store")
        return self._controls.store


def usable_blocks(blocks: Sequence[Key], snapshots: Sequence[Key], there: Set[Key]) -> int:
    """Length, in blocks, of the longest prefix that is usable as a whole (L4): all its blocks are there and, where the
    layout has snapshots, the one at its end."""
    whole = next((index for index, key in enumerate(blocks) if key not in there), len(blocks))
    if not snapshots:
        return whole
    return max((end for end in range(1, whole + 1) if snapshots[end - 1] in there), default=0)


def _keys(request: control_pb2.FindCacheRequest | control_pb2.PinCacheRequest) -> tuple[list[Key], list[Key]]:
    """Blocks and snapshots. Raises InvalidArgument."""
    if request.WhichOneof("of") != "keys":
        raise InvalidArgument("only a router can name a prompt's keys; ask it, or give keys", field="prompt")
    blocks, snapshots = list(request.keys.blocks), list(request.keys.snapshots)
    if any(len(key) != KEY_BYTES for key in (*blocks, *snapshots)):
        raise InvalidArgument(f"a key has {KEY_BYTES} bytes", field="keys")
    if snapshots and len(snapshots) != len(blocks):
        raise InvalidArgument("give a snapshot key for each block, or none", field="keys.snapshots")
    if len(blocks) > MAX_FIND_KEYS:
        raise InvalidArgument(f"{len(blocks)} keys; at most {MAX_FIND_KEYS} are taken", field="keys.blocks")
    return blocks, snapshots


def _add(
    found: Sequence[control_pb2.FoundBlock],
    blocks: Sequence[control_pb2.CachePlace | None],
    snapshots: Sequence[control_pb2.CachePlace | None],
) -> None:
    for index, place in enumerate(blocks):
        if place is not None:
            found[index].places.append(place)
    for index, place in enumerate(snapshots):
        if place is not None:
            found[index].snapshot_places.append(place)


async def _off_loop(call: Callable[[], T]) -> T:
    """A store's blocking call on a thread; its refusal is the operator's to act on."""
    try:
        return await asyncio.to_thread(call)
    except StoreError as error:
        raise FailedPrecondition(str(error)) from error
