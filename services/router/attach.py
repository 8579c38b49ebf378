"""The one stream between this router and one decode replica: events in, renewals, credit and cancels out.

Decode sends one message per step for all requests. Each request has a feed here; a slow client fills only its own, up
to its credit, and then decode pauses that request alone. When the stream breaks, the requests on it fail at once and
a new stream is opened for later ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc.aio

from headrace.services.runtime import logs
from headrace.services.runtime.errors import Unavailable, from_rpc_error
from headrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc

_log = logs.get(__name__)
RECONNECT_S = 0.2
"""Pause before a broken stream is opened again."""


class Feed:
    """Events of one attempt, in order. `renewed` from the moment decode has promised room."""

    def __init__(self, attempt: common_pb2.AttemptId, credit_tokens: int, changed: Callable[[Feed], None]) -> None:
        self.attempt = attempt
        self.renewed = False
        self.begun = False
        """Decode has sent tokens: it has the request, and needs prefill no more."""
        self.credit = credit_tokens
        self._window = credit_tokens
        self._consumed = 0
        self._changed = changed
        self._events: asyncio.Queue[decode_pb2.RequestEvents | Exception] = asyncio.Queue()

    def put(self, item: decode_pb2.RequestEvents | Exception) -> None:
        """An event, or the failure that ends the feed. Bounded by the credit."""
        self.begun = self.begun or (isinstance(item, decode_pb2.RequestEvents) and len(item.tokens) > 0)
        self._events.put_nowait(item)

    async def next(self) -> decode_pb2.RequestEvents:
        """The next event; raises the failure that ended the feed."""
        item = await self._events.get()
        if isinstance(item, Exception):
            raise item
        return item

    def consume(self, tokens: int) -> None:
        """The client took these tokens; decode may send as many more, told when half the window is used up."""
        self._consumed += tokens
        if self._consumed + self._window - self.credit >= max(1, self._window // 2):
            self.credit = self._consumed + self._window
            self._changed(self)


class DecodeLink:
    """Runs the stream to one life of one decode replica for as long as it is a member."""

    def __init__(
        self,
        router: common_pb2.PeerId,
        channel: grpc.aio.Channel,
        *,
        renew_s: float,
        credit_tokens: int,
        on_load: Callable[[common_pb2.LoadReport], None],
    ) -> None:
        self._router = router
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._renew_s = renew_s
        self._credit_tokens = credit_tokens
        self._on_load = on_load
        self._feeds: dict[tuple[str, int], Feed] = {}
        self._granted: dict[Feed, None] = {}
        """Feeds with more credit than decode has been told, in order."""
        self._cancels: list[decode_pb2.AttachCancel] = []
        self._dirty = asyncio.Event()
        self.attached = asyncio.Event()
        """The stream is open both ways; requests may be reserved."""
        self._task = asyncio.create_task(self._run(), name="decode-link")

    @property
    def live(self) -> int:
        """Requests with a feed."""
        return len(self._feeds)

    def open(self, attempt: common_pb2.AttemptId) -> Feed:
        """A feed for an attempt that is about to be reserved."""
        feed = Feed(attempt, self._credit_tokens, self._grant)
        self._feeds[_key(attempt)] = feed
        return feed

    def keep(self, feed: Feed) -> None:
        """Decode has promised room: renew its lease and grant its credit from now on (L8)."""
        feed.renewed = True
        self._grant(feed)

    def _grant(self, feed: Feed) -> None:
        self._granted[feed] = None
        self._dirty.set()

    def close(self, feed: Feed, cancel: common_pb2.FinishReason.ValueType | None = None) -> None:
        """The attempt is over here; with `cancel` decode is told to end it. Closing twice does nothing."""
        if self._feeds.pop(_key(feed.attempt), None) is None:
            return
        self._granted.pop(feed, None)
        if cancel is not None:
            self._cancels.append(decode_pb2.AttachCancel(id=feed.attempt, reason=cancel))
            self._dirty.set()

    async def stop(self) -> None:
        """The replica is gone or this router ends: fail what is open and end the stream."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail("the decode replica is gone; the request is lost")

    async def _run(self) -> None:
        while True:
            try:
                await self._stream()
                reason = "the decode replica closed the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"the stream to the decode replica broke: {from_rpc_error(error)}"
            self.attached.clear()
            self._fail(reason)
            _log.warning("detached", reason=reason)
            await asyncio.sleep(RECONNECT_S)

    async def _stream(self) -> None:
        call = self._stub.Attach(self._messages())
        try:
            async for response in call:
                self.attached.set()
                self._take(response)
        finally:
            call.cancel()

    async def _messages(self) -> AsyncIterator[decode_pb2.AttachRequest]:
        """All live requests first, and again every `renew_s`; in between, as soon as they wait, cancels and the
        requests that got more credit: with a thousand live ones, naming all at every grant would be most of the work.
        """
        loop = asyncio.get_running_loop()
        router: common_pb2.PeerId | None = self._router
        renewal = loop.time()
        while True:
            self._dirty.clear()
            everything = loop.time() >= renewal
            if everything:
                renewal = loop.time() + self._renew_s
            feeds = self._feeds.values() if everything else self._granted
            requests = [
                decode_pb2.AttachedRequest(id=feed.attempt, credit_tokens=feed.credit) for feed in feeds if feed.renewed
            ]
            self._granted.clear()
            cancels, self._cancels = self._cancels, []
            yield decode_pb2.AttachRequest(router=router, requests=requests, cancels=cancels)
            router = None
            with suppress(TimeoutError):
                async with asyncio.timeout_at(renewal):
                    await self._dirty.wait()

    def _take(self, response: decode_pb2.AttachResponse) -> None:
        if response.HasField("load"):
            self._on_load(response.load)
        for events in response.requests:
            feed = self._feeds.get(_key(events.id))
            if feed is not None:  # else: it was cancelled here, and its last events crossed the cancel
                feed.put(events)
        for attempt in response.unknown:
            feed = self._feeds.get(_key(attempt))
            if feed is not None:
                feed.put(Unavailable("the decode replica does not know the request any more"))

    def _fail(self, reason: str) -> None:
        for feed in self._feeds.values():
            feed.put(Unavailable(reason))


def _key(attempt: common_pb2.AttemptId) -> tuple[str, int]:
    return attempt.request_id, attempt.attempt
