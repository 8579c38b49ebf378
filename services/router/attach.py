"""The one stream between this router and one decode replica: events in, renewals, credit and cancels out.

Decode sends one message per step for all requests. Each request has a feed here; a slow client fills only its own, up
to its credit, and then decode pauses that request alone. A stream that breaks is opened again at once, and goes on
from what has arrived; if that fails, or decode is silent for too long, its requests fail and are continued elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

import grpc.aio

from headrace.services.runtime import logs
from headrace.services.runtime.errors import Aborted, Unavailable, from_rpc_error, task_is_cancelled
from headrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc

_log = logs.get(__name__)
RECONNECT_S = 0.2
"""Pause before a stream that could not be opened is tried again."""
RESTARTED = "the decode replica was restarted"
GONE = "the decode replica is gone; the request is lost"
OWN_STALL_S = 0.5
"""A timer of this process that is so late says that this process stood still, not its peer."""


class Overtaken(Aborted):
    """Another stream of the same request has it now, or a newer attempt: it is over here, and not repeated (L16)."""


class _AnotherLife(Exception):
    """Who answers is not the one that this link is for."""


class Feed:
    """Events of one attempt, in order. `renewed` from the moment decode has promised room."""

    def __init__(
        self,
        attempt: common_pb2.AttemptId,
        credit_tokens: int,
        changed: Callable[[Feed], None],
        received: Sequence[int] = (),
    ) -> None:
        """`received`: tokens of each choice that came before, of an attempt that another router began."""
        self.attempt = attempt
        self.renewed = False
        self.adopted = bool(received)
        """Decode waits for `received` before it sends anything."""
        self.begun = False
        """Decode has sent tokens: it has the request, and needs prefill no more."""
        self.received = list(received)
        """Tokens of each choice since the attempt's start that have arrived here."""
        self._consumed = sum(received)
        self._window = credit_tokens
        self.credit = self._consumed + credit_tokens
        self._changed = changed
        self._events: asyncio.Queue[decode_pb2.RequestEvents | Exception] = asyncio.Queue()

    def put(self, item: decode_pb2.RequestEvents | Exception) -> None:
        """An event, or the failure that ends the feed. Bounded by the credit."""
        if isinstance(item, decode_pb2.RequestEvents):
            for tokens in item.tokens:
                self.begun = True
                if tokens.choice >= len(self.received):
                    self.received += [0] * (tokens.choice + 1 - len(self.received))
                self.received[tokens.choice] += len(tokens.token_ids)
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
    """Runs the stream to one life of one decode replica while it is a member, or until another life answers."""

    def __init__(
        self,
        router: common_pb2.PeerId,
        channel: grpc.aio.Channel,
        *,
        renew_s: float,
        silence_s: float,
        credit_tokens: int,
        on_load: Callable[[common_pb2.LoadReport], None],
        on_broken: Callable[[bool], None] = lambda broken: None,
        life: str = "",
    ) -> None:
        """`life`: incarnation of the replica; default: whoever answers first. `silence_s`: decode counts as stalled
        when it has said nothing for so long; every word here is answered. `on_broken` is told when the stream
        breaks, and when it is open again."""
        self._router = router
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._renew_s = renew_s
        self._silence_s = silence_s
        self._heard = 0.0
        """When decode said something last, or was asked to; on the loop's clock."""
        self._peer = life
        """Incarnation of who is to answer."""
        self._over = ""
        """Why no stream follows: the replica is gone, or another life answers at the address, to which that one's own
        link speaks, and whose stream this one would take."""
        self._credit_tokens = credit_tokens
        self._on_load = on_load
        self._on_broken = on_broken
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

    def open(self, attempt: common_pb2.AttemptId, received: Sequence[int] = ()) -> Feed:
        """A feed for an attempt that is about to be reserved, or was adopted after `received` tokens."""
        feed = Feed(attempt, self._credit_tokens, self._grant, received)
        self._feeds[_key(attempt)] = feed
        if self._over:
            feed.put(Unavailable(self._over))
        return feed

    def detach(self, request_id: str) -> None:
        """A client resumes a request that is live here: its feeds end, and decode keeps what it has."""
        for key, feed in tuple(self._feeds.items()):
            if key[0].partition("/")[0] == request_id:
                self._drop(feed)
                feed.put(Overtaken("the client resumed the request on another stream"))

    def _drop(self, feed: Feed) -> bool:
        """Whether the feed was open."""
        if self._feeds.get(_key(feed.attempt)) is not feed:
            return False
        del self._feeds[_key(feed.attempt)]
        self._granted.pop(feed, None)
        return True

    def keep(self, feed: Feed) -> None:
        """Decode has promised room: renew its lease and grant its credit from now on (L8)."""
        feed.renewed = True
        self._grant(feed)

    def _grant(self, feed: Feed) -> None:
        self._granted[feed] = None
        self._dirty.set()

    def close(self, feed: Feed, cancel: common_pb2.FinishReason.ValueType | None = None) -> None:
        """The attempt is over here; with `cancel` decode is told to end it. Closing twice does nothing."""
        if not self._drop(feed):
            return
        if cancel is not None:
            self._cancels.append(decode_pb2.AttachCancel(id=feed.attempt, reason=cancel))
            self._dirty.set()

    async def stop(self) -> None:
        """The replica is gone or this router ends: fail what is open and end the stream."""
        self._over = GONE
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail(GONE)

    async def _run(self) -> None:
        while not self._over:
            reason, stalled = await self._stream()
            if task_is_cancelled():  # grpc.aio loses a cancel that comes with the end of a call
                raise asyncio.CancelledError
            was_open = self.attached.is_set()
            self.attached.clear()
            self._on_broken(True)
            (_log.warning if was_open else _log.debug)("detached", reason=reason)
            if stalled or not was_open:
                self._fail(reason)
                await asyncio.sleep(RECONNECT_S)

    async def _stream(self) -> tuple[str, bool]:
        """One stream to its end: why it ended, and whether decode stalled."""
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        call = self._stub.Attach()
        # A task of this link's own: one that gRPC starts for an iterator waits for ever where there is no connection.
        talk = asyncio.create_task(self._talk(call), name="decode-words")
        watch = asyncio.create_task(self._watch(call), name="decode-silence")
        try:
            async for response in call:
                self._heard = loop.time()
                self._take(response)
        except _AnotherLife:
            self._over = RESTARTED
            return RESTARTED, True
        except grpc.aio.AioRpcError as error:
            return f"the stream to the decode replica broke: {from_rpc_error(error)}", False
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            if watch.done():
                return f"the decode replica has said nothing for {self._silence_s:g} s", True
            return "the way to the decode replica was closed", False
        finally:
            watch.cancel()
            call.cancel()
            talk.cancel()
            await asyncio.gather(talk, return_exceptions=True)
        return "the decode replica closed the stream", False

    async def _talk(self, call: grpc.aio.StreamStreamCall[decode_pb2.AttachRequest, decode_pb2.AttachResponse]) -> None:
        """Says everything that is to be said, until the stream ends, of which its reader hears."""
        async with aclosing(self._messages()) as messages:
            async for message in messages:
                await call.write(message)

    async def _watch(
        self, call: grpc.aio.StreamStreamCall[decode_pb2.AttachRequest, decode_pb2.AttachResponse]
    ) -> None:
        """Ends the stream when decode stalls (L15)."""
        loop = asyncio.get_running_loop()
        while (until := self._heard + self._silence_s) > loop.time():
            await asyncio.sleep(until - loop.time())
            if loop.time() - until > OWN_STALL_S:
                self._heard = loop.time()
        call.cancel()

    async def _messages(self) -> AsyncGenerator[decode_pb2.AttachRequest, None]:
        """All live requests first, and again every `renew_s`; in between, as soon as they wait, cancels and the
        requests that got more credit: with a thousand live ones, naming all at every grant would be most of the work.
        """
        loop = asyncio.get_running_loop()
        router: common_pb2.PeerId | None = self._router
        renewal = loop.time()
        while True:
            self._dirty.clear()
            everything = loop.time() >= renewal or router is not None
            if everything:
                renewal = loop.time() + self._renew_s
            feeds = self._feeds.values() if everything else self._granted
            requests = [_named(feed, whole=router is not None) for feed in feeds if feed.renewed]
            self._granted.clear()
            cancels, self._cancels = self._cancels, []
            yield decode_pb2.AttachRequest(router=router, requests=requests, cancels=cancels)
            router = None
            with suppress(TimeoutError):
                async with asyncio.timeout_at(renewal):
                    await self._dirty.wait()

    def _take(self, response: decode_pb2.AttachResponse) -> None:
        if response.HasField("decode"):
            if self._peer not in ("", response.decode.incarnation):
                raise _AnotherLife
            self._peer = response.decode.incarnation
            self._on_broken(False)
            self.attached.set()
        if response.HasField("load"):
            self._on_load(response.load)
        for attempt in response.overtaken:
            feed = self._feeds.get(_key(attempt))
            if feed is not None:
                self._drop(feed)
                feed.put(Overtaken("the request was resumed on another stream"))
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


def _named(feed: Feed, *, whole: bool) -> decode_pb2.AttachedRequest:
    """A feed as a message names it; `whole`: with what has arrived of it, since the stream is new."""
    received = feed.received if whole or feed.adopted else ()
    feed.adopted = False
    return decode_pb2.AttachedRequest(id=feed.attempt, credit_tokens=feed.credit, received_tokens=received)


def _key(attempt: common_pb2.AttemptId) -> tuple[str, int]:
    return attempt.request_id, attempt.attempt
