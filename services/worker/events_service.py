"""EventService: what this process's caches hold, told as it changes (L24).

A watcher is a position in a log and nothing else: it takes no memory here, and one that is slow falls behind until its
position is no longer kept; then it hears of a gap and takes a snapshot. Events go out in batches, as many as wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import grpc.aio

from headrace.kvcache.event_log import EventLog
from headrace.kvcache.store.base import StoreError
from headrace.services.runtime.errors import InvalidArgument, NotFound, Unavailable
from headrace.services.runtime.server import ServiceServer
from headrace.services.worker.cache_wire import event_to_wire, stored_to_wire, tier_from_wire
from headrace.v1 import common_pb2, events_pb2, events_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
MESSAGE_KEYS: Final = 4096
"""Keys in one message: about 140 KiB, well below every message limit."""
_NAMES: Final = {events_pb2.EVENT_SOURCE_WORKER: "worker", events_pb2.EVENT_SOURCE_STORE: "store"}


class EventServicer(events_pb2_grpc.EventServiceServicer):
    """Serves one log per source of this process."""

    def __init__(self, worker: EventLog, store: EventLog | None = None) -> None:
        """`store`: the log of this process's store writer, where it has one."""
        self._logs: Mapping[int, EventLog] = {
            events_pb2.EVENT_SOURCE_WORKER: worker,
            **({} if store is None else {events_pb2.EVENT_SOURCE_STORE: store}),
        }
        self.watchers = 0
        """Open Watch calls."""

    async def Watch(
        self, request: events_pb2.EventServiceWatchRequest, context: _Context
    ) -> AsyncIterator[events_pb2.EventServiceWatchResponse]:
        """See events.proto. Never ends by itself."""
        log = self._log(request.event_source)
        source = _peer(log)
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        end = log.listen(lambda: _wake(loop, news))
        self.watchers += 1
        try:
            incarnation, position, first = request.incarnation, request.from_sequence, True
            while True:
                news.clear()
                read = log.read(position, incarnation, most_keys=MESSAGE_KEYS)
                incarnation, position = log.source.incarnation, read.next_sequence
                if first or read.gap or read.events:
                    yield events_pb2.EventServiceWatchResponse(
                        source=source, events=[event_to_wire(event) for event in read.events], gap=read.gap
                    )
                else:
                    await news.wait()
                first = False
        finally:
            self.watchers -= 1
            end()

    async def Snapshot(
        self, request: events_pb2.SnapshotRequest, context: _Context
    ) -> AsyncIterator[events_pb2.SnapshotResponse]:
        """See events.proto. A store's contents are listed from its index, off the event loop."""
        log = self._log(request.event_source)
        tiers = [tier_from_wire(tier) for tier in request.tiers]
        snapshot = await asyncio.to_thread(log.snapshot, tiers)
        entries = iter(snapshot.entries)
        while True:
            try:
                page, more = await asyncio.to_thread(_page, entries)
            except StoreError as error:
                raise Unavailable(str(error), retry_after_s=1.0) from error
            yield events_pb2.SnapshotResponse(
                source=_peer(log), watermark=snapshot.watermark, entries=page, last=not more
            )
            if not more:
                return

    def _log(self, source: int) -> EventLog:
        wanted = source or events_pb2.EVENT_SOURCE_WORKER
        if wanted not in _NAMES:
            raise InvalidArgument(f"{source} is no source", field="event_source")
        log = self._logs.get(wanted)
        if log is None:
            raise NotFound("this process writes to no store; watch its worker source", field="event_source")
        return log


def add_event_service(server: ServiceServer, worker: EventLog, store: EventLog | None = None) -> EventServicer:
    """Serve events of a process; before the server starts."""
    servicer = EventServicer(worker, store)
    server.add(
        events_pb2_grpc.add_EventServiceServicer_to_server,
        servicer,
        events_pb2.DESCRIPTOR.services_by_name["EventService"],
    )
    return servicer


def _peer(log: EventLog) -> common_pb2.PeerId:
    return common_pb2.PeerId(replica_id=log.source.replica_id, incarnation=log.source.incarnation)


def _page(entries: Any) -> tuple[list[events_pb2.Stored], bool]:
    """Up to MESSAGE_KEYS keys, and whether there may be more."""
    page: list[events_pb2.Stored] = []
    keys = 0
    for stored in entries:
        page.append(stored_to_wire(stored))
        keys += len(stored.keys)
        if keys >= MESSAGE_KEYS:
            return page, True
    return page, False


def _wake(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    """On the appending thread, which may outlive the loop by a moment. One wake-up stands for many events."""
    if not news.is_set() and not loop.is_closed():
        loop.call_soon_threadsafe(news.set)
