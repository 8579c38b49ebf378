"""Cache events of every worker into the prefix index: one task per life of a worker and source (L14, L24).

A task follows `EventService.Watch` from where its cursor stands and takes a snapshot when events are missing. A worker
that does not answer costs nothing but its task's next try, later each time; one that is gone takes its task and its
part of the index with it (L6). Snapshots, of which a restarted router wants one from everybody, go a few at a time.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import grpc.aio

from headrace.kvcache.keys import Key
from headrace.router.index.base import HolderTier, PrefixIndex
from headrace.router.index.changes import Change, Cleared, Numbered, Removed, Stored
from headrace.router.index.cursor import Cursor, CursorCounts, HolderHoldings
from headrace.router.index.store_view import StoreView
from headrace.services.runtime import logs
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import from_rpc_error
from headrace.v1 import common_pb2, control_pb2, events_pb2, events_pb2_grpc

_log = logs.get(__name__)
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Between tries at a worker that does not answer; it may be up again before the registry knows that it was down."""
SNAPSHOT_S: Final = 30.0
"""Deadline of a whole snapshot (L6)."""
SNAPSHOTS_AT_ONCE: Final = 4
SUSPECT_S: Final = 10.0
"""A worker whose hints were wrong is asked for everything at most this often."""
TURN_KEYS: Final = 512
"""Keys that are applied before other work of the event loop has its turn: about 2 ms."""
_TIERS: Final = {control_pb2.CACHE_TIER_DEVICE: HolderTier.DEVICE, control_pb2.CACHE_TIER_HOST: HolderTier.HOST}
_KEY_BYTES: Final = 32


@dataclass(eq=False, slots=True)
class Expectation:
    """A worker's events promise leading blocks of a prompt; a removal until prefill has looked explains their lack."""

    incarnation: str
    blocks: int
    keys: tuple[Key, ...]
    """The last block's and its snapshot's: of a chain the end is evicted first."""
    withdrawn: bool = False


class WrongSource(Exception):
    """Another life of the replica answered; the registry will say so."""


class CacheFeed:
    """Keeps an index and a view of the store true. Everything here belongs to the event loop's thread."""

    def __init__(self, index: PrefixIndex, view: StoreView, clock: Clock) -> None:
        self._index = index
        self._view = view
        self._clock = clock
        self._snapshots = asyncio.Semaphore(SNAPSHOTS_AT_ONCE)
        self._followed: dict[str, _Followed] = {}
        """By incarnation."""
        self._past = CursorCounts()
        """Of workers that are gone."""
        self.failures: Counter[str] = Counter()
        """Streams that ended, by status."""

    def join(self, worker: common_pb2.PeerId, channel: grpc.aio.Channel, holders: Sequence[int]) -> None:
        """A worker is there; its ranks have these numbers."""
        if worker.incarnation not in self._followed:
            self._followed[worker.incarnation] = _Followed(self, worker, channel, holders)

    def leave(self, incarnation: str) -> None:
        """It is gone, and what it held is gone from the index before this returns (L14)."""
        followed = self._followed.pop(incarnation, None)
        if followed is not None:
            followed.end()
            for each in fields(CursorCounts):
                name = each.name
                setattr(self._past, name, getattr(self._past, name) + getattr(followed.cursor.counts, name))

    def suspect(self, incarnation: str) -> bool:
        """What the index said of a worker proved wrong, and nothing that the worker told explains it: ask it for
        everything. False when that was done a moment ago."""
        followed = self._followed.get(incarnation)
        return followed is not None and followed.suspect(self._clock.monotonic())

    def expect(self, incarnation: str, blocks: int, keys: Sequence[Key]) -> Expectation | None:
        """Note what a worker is believed to hold; `settle` ends it. None: it is not followed."""
        followed = self._followed.get(incarnation)
        if followed is None:
            return None
        expectation = Expectation(incarnation, blocks, tuple(keys))
        for key in keys:
            followed.expected.setdefault(key, []).append(expectation)
        return expectation

    def settle(self, expectation: Expectation) -> None:
        """Nobody waits for its truth any more. Idempotent."""
        followed = self._followed.get(expectation.incarnation)
        for key in expectation.keys if followed is not None else ():
            assert followed is not None
            left = [each for each in followed.expected.get(key, ()) if each is not expectation]
            if left:
                followed.expected[key] = left
            else:
                followed.expected.pop(key, None)

    @property
    def sources(self) -> int:
        """Workers that are followed."""
        return len(self._followed)

    @property
    def lost(self) -> int:
        """Of these, those of which a snapshot is wanted."""
        return sum(followed.cursor.lost for followed in self._followed.values())

    def counts(self) -> CursorCounts:
        """Of all workers since start."""
        cursors = [self._past, *(followed.cursor.counts for followed in self._followed.values())]
        return CursorCounts(*(sum(getattr(each, name.name) for each in cursors) for name in fields(CursorCounts)))

    async def close(self) -> None:
        """End all tasks."""
        tasks = [task for followed in self._followed.values() for task in followed.tasks]
        for incarnation in tuple(self._followed):
            self.leave(incarnation)
        await asyncio.gather(*tasks, return_exceptions=True)


class _Followed:
    """One life of one worker."""

    def __init__(
        self, feed: CacheFeed, worker: common_pb2.PeerId, channel: grpc.aio.Channel, holders: Sequence[int]
    ) -> None:
        self._feed = feed
        self._worker = worker
        self._stub = events_pb2_grpc.EventServiceStub(channel)
        self.cursor = Cursor(HolderHoldings(feed._index, holders))
        self.cursor.restart(worker.incarnation)
        self.expected: dict[Key, list[Expectation]] = {}
        self._suspected = float("-inf")
        self._store_incarnation = ""
        self._store_next = 1
        self._wanted = asyncio.Event()
        """A snapshot is wanted although no event says so."""
        self.tasks = (
            asyncio.create_task(self._keep(self._follow_worker), name="cache-feed"),
            asyncio.create_task(self._keep(self._follow_store), name="store-feed"),
        )

    def suspect(self, now: float) -> bool:
        if now - self._suspected < SUSPECT_S:
            return False
        self._suspected = now
        self.cursor.suspect()
        self._wanted.set()
        return True

    def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.cursor.restart("")

    async def _keep(self, follow: Any) -> None:
        """Follow for ever, or until the worker says that it has no such source."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                if await follow():
                    pause = FIRST_PAUSE_S
                status = "ended"
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return
                status = error.code().name
                _log.info("cache events broke off", replica=self._worker.replica_id, error=str(from_rpc_error(error)))
            except WrongSource:
                status = "WRONG_SOURCE"
            self._feed.failures[status] += 1
            self.cursor.abandon_snapshot()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    # --- the worker's own tiers ------------------------------------------------------------------------------------

    async def _follow_worker(self) -> bool:
        """One stream, to its end; whether anything came."""
        cursor = self.cursor
        call = self._stub.Watch(
            events_pb2.EventServiceWatchRequest(
                incarnation=cursor.incarnation,
                from_sequence=cursor.next_sequence,
                event_source=events_pb2.EVENT_SOURCE_WORKER,
            )
        )
        came = False
        wanted = asyncio.create_task(self._when_wanted(), name="cache-snapshot")
        try:
            async for response in call:
                came = True
                self._check(response.source)
                if response.gap:
                    cursor.take(cursor.incarnation, (), gap=True)
                    self._wanted.set()
                await self._apply(response.events)
                if cursor.lost:
                    self._wanted.set()
                if wanted.done():
                    wanted.result()
            return came
        finally:
            wanted.cancel()
            call.cancel()

    async def _apply(self, events: Iterable[events_pb2.CacheEvent]) -> None:
        keys = 0
        for wire in events:
            change = _change(wire)
            self.cursor.take(self.cursor.incarnation, (Numbered(wire.sequence, change),))
            if self.expected and not isinstance(change, Stored | None):
                self._withdraw(change)
            keys += len(change.keys) if isinstance(change, Stored | Removed) else 1
            if keys >= TURN_KEYS:
                keys = 0
                await asyncio.sleep(0)

    def _withdraw(self, change: Removed | Cleared) -> None:
        keys = change.keys if isinstance(change, Removed) else tuple(self.expected)
        for key in keys:
            for expectation in self.expected.get(key, ()):
                expectation.withdrawn = True

    async def _when_wanted(self) -> None:
        """Snapshots, beside the stream: events that come meanwhile wait in the cursor."""
        pause = FIRST_PAUSE_S
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self.cursor.lost:
                try:
                    async with self._feed._snapshots:
                        await self._snapshot()
                    pause = FIRST_PAUSE_S
                except (grpc.aio.AioRpcError, WrongSource) as error:
                    self.cursor.abandon_snapshot()
                    _log.info("no cache snapshot", replica=self._worker.replica_id, error=str(error))
                if self.cursor.lost:
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _snapshot(self) -> None:
        incarnation = self.cursor.incarnation
        request = events_pb2.SnapshotRequest(tiers=list(_TIERS), event_source=events_pb2.EVENT_SOURCE_WORKER)
        begun = False
        pieces: AsyncIterable[events_pb2.SnapshotResponse] = self._stub.Snapshot(request, timeout=SNAPSHOT_S)
        async for piece in pieces:
            self._check(piece.source)
            if not begun and not self.cursor.begin_snapshot(incarnation, piece.watermark):
                return
            begun = True
            for wire in piece.entries:
                for stored in _stored(wire, TURN_KEYS):
                    self.cursor.snapshot_piece(incarnation, (stored,))
                    await asyncio.sleep(0)
            if piece.last:
                self.cursor.end_snapshot(incarnation)
                return

    def _check(self, source: common_pb2.PeerId) -> None:
        """L14: only this life's words count."""
        if source.incarnation != self._worker.incarnation:
            raise WrongSource

    # --- the store, as its writer tells ----------------------------------------------------------------------------

    async def _follow_store(self) -> bool:
        """What the worker's store writer wrote and dropped. There is no snapshot of a store: lost words make the view
        forget, and what it then wants to know it asks."""
        call = self._stub.Watch(
            events_pb2.EventServiceWatchRequest(
                incarnation=self._store_incarnation,
                from_sequence=self._store_next,
                event_source=events_pb2.EVENT_SOURCE_STORE,
            )
        )
        came = False
        try:
            async for response in call:
                came = True
                if response.gap and self._store_incarnation:
                    self._feed._view.forget()
                self._store_incarnation = response.source.incarnation
                for wire in response.events:
                    self._store_next = wire.sequence + 1
                    self._tell_view(wire)
                    await asyncio.sleep(0)
            return came
        finally:
            call.cancel()

    def _tell_view(self, wire: events_pb2.CacheEvent) -> None:
        view, now = self._feed._view, self._feed._clock.monotonic()
        match wire.WhichOneof("change"):
            case "stored":
                view.stored(wire.stored.keys, now)
            case "removed":
                view.removed(wire.removed.keys, now)
            case "bucket_dropped" | "namespace_dropped" | "cleared":
                view.forget()
            case _:
                pass


def _change(wire: events_pb2.CacheEvent) -> Change | None:
    """None for a change that this version does not know, or that no worker's own tier can have: its number counts."""
    match wire.WhichOneof("change"):
        case "stored" if wire.stored.tier in _TIERS and _whole(wire.stored.keys):
            return Stored(_TIERS[wire.stored.tier], tuple(wire.stored.keys))
        case "removed" if wire.removed.tier in _TIERS and _whole(wire.removed.keys):
            return Removed(_TIERS[wire.removed.tier], tuple(wire.removed.keys))
        case "cleared" if wire.cleared.tier in _TIERS:
            return Cleared(_TIERS[wire.cleared.tier])
        case _:
            return None


def _stored(wire: events_pb2.Stored, most_keys: int) -> Iterable[Stored]:
    if wire.tier in _TIERS and _whole(wire.keys):
        for begin in range(0, len(wire.keys), most_keys):
            yield Stored(_TIERS[wire.tier], tuple(wire.keys[begin : begin + most_keys]))


def _whole(keys: Sequence[bytes]) -> bool:
    """L13: a peer's nonsense never ends a task."""
    return all(len(key) == _KEY_BYTES for key in keys)
