"""The streams to routers: one per router, one message per step for all of its requests; renewals, credit, cancels in.

A stream that breaks takes nothing with it: requests run on until their lease ends, and a new stream of the same router
goes on where the old one stopped, or one of another router that has taken the request over for its client.
Every word of a router is answered, if by nothing else then by a load: silence tells it that this process stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from headrace.engine.messages import Cancel, Credit, Event, Finished, Renew, Tokens, Usage
from headrace.engine.request import RequestKey
from headrace.services.decode.handover import hand_over
from headrace.services.decode.journal import RequestJournal
from headrace.services.decode.journals import Journals
from headrace.services.runtime import logs, peers
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import Aborted, InvalidArgument
from headrace.services.runtime.ids import short
from headrace.services.worker.engine_link import EngineLink
from headrace.services.worker.events_wire import TokenBytes, reason_from_wire
from headrace.services.worker.reports import EngineReporter
from headrace.services.worker.spec_wire import attempt_id, request_key
from headrace.v1 import common_pb2, decode_pb2

_log = logs.get(__name__)
WORD_S = 0.1
"""A router that has heard something so recently needs no word of its own."""
MOST_TOKENS = 16384
"""In one message, unless a single request's credit is more. A step has one per sequence; but a stream that opens again
brings all that waits, a token with its log-probabilities may take 600 B, and a message that is too large breaks it."""


class RouterStream:
    """What waits for one stream."""

    def __init__(self, router: str) -> None:
        self.router = router
        self.dirty: dict[RequestKey, None] = {}
        """Requests with news, in order."""
        self.unknown: list[common_pb2.AttemptId] = []
        self.overtaken: list[common_pb2.AttemptId] = []
        self.silent_since = 0.0
        """When something was sent last."""
        self.asked = False
        """The router has said something since."""
        self.wake = asyncio.Event()
        self.replaced = False

    def note(self, key: RequestKey) -> None:
        self.dirty[key] = None
        self.wake.set()


class AttachHub:
    """Journals of all requests and the streams that carry them off. Belongs to the event loop's thread."""

    def __init__(self, peer: common_pb2.PeerId, token_bytes: TokenBytes, clock: Clock, journals: Journals) -> None:
        self._peer = peer
        self._token_bytes = token_bytes
        self._clock = clock
        self._journals = journals
        self._streams: dict[str, RouterStream] = {}
        self.link: EngineLink
        self.reporter: EngineReporter
        """Both set before the port opens; the link needs `on_events` of this object first."""

    # --- journals ----------------------------------------------------------------------------------------------

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return sum(journal.ended_at is None for journal in self._journals.all())

    @property
    def undelivered(self) -> int:
        """Requests that have not ended, or whose end has not been sent to an attached router."""
        return sum(
            journal.ended_at is None or (not journal.delivered and journal.router in self._streams)
            for journal in self._journals.all()
        )

    @property
    def streams(self) -> int:
        """Attached routers."""
        return len(self._streams)

    def journal(self, key: RequestKey) -> RequestJournal | None:
        return self._journals.get(key)

    def begin(self, journal: RequestJournal) -> bool:
        """Keep a journal from now on; False when there is one of this key, which stays."""
        return self._journals.begin(journal)

    def drop(self, key: RequestKey) -> None:
        """The engine refused the request: no event will come."""
        self._journals.drop(key)

    def on_events(self, events: tuple[Event, ...]) -> None:
        """All events of one turn of the engine. Those of the process's own canary have no journal."""
        now = self._clock.monotonic()
        for event in events:
            journal = self._journals.get(event.key)
            if journal is None or not isinstance(event, Tokens | Finished | Usage):
                continue
            journal.add(event, self._token_bytes, self._peer.replica_id, now)
            stream = self._streams.get(journal.router)
            if stream is not None:
                stream.note(journal.key)
        self.reporter.refresh()

    def reap(self) -> None:
        """Forget what ended long ago, and keep orphans alive for their time (L8, L9)."""
        now = self._clock.monotonic()
        self._journals.reap(now, lambda router: router in self._streams)
        orphans = self._journals.orphans(now)
        if orphans:
            self.link.post(Renew(orphans))

    def adopt(
        self,
        request_id: str,
        content: bytes,
        offsets: Sequence[int],
        router: str,
        single_content: Callable[[int], bytes],
    ) -> decode_pb2.AdoptResponse:
        """Hand a request to another router, as `handover.hand_over` does, and take every other attempt of it from
        whoever has it (L16)."""
        now = self._clock.monotonic()
        handed = hand_over(self._journals.of(request_id), request_id, content, offsets, router, now, single_content)
        for journal, former in handed.taken:
            self.link.post(Renew((journal.key,)))
            self._tell_overtaken(former, router, journal.key)
        stream = self._streams.get(router)
        for journal in handed.left:
            self._tell_overtaken(journal.router, router, journal.key)
            # Who had it hears that it is overtaken, if only when it attaches again; its end is the new one's to take.
            journal.router = router
            if stream is not None:
                stream.note(journal.key)
            if journal.ended_at is None:
                self.link.post(Cancel(journal.key))
        return handed.response

    def _tell_overtaken(self, former: str, router: str, key: RequestKey) -> None:
        stream = self._streams.get(former)
        if stream is not None and former != router:
            stream.overtaken.append(attempt_id(key))
            stream.wake.set()

    # --- the stream --------------------------------------------------------------------------------------------

    async def attach(
        self, requests: AsyncIterator[decode_pb2.AttachRequest]
    ) -> AsyncGenerator[decode_pb2.AttachResponse, None]:
        """Serve one stream until the router leaves. Raises InvalidArgument, Aborted when a newer stream replaces it."""
        first = await anext(aiter(requests), None)
        if first is None:
            return
        if not first.router.incarnation:
            raise InvalidArgument("the first message names the router", field="router")
        peers.require_claim(first.router, field="router")
        stream = RouterStream(first.router.incarnation)
        former = self._streams.get(stream.router)
        if former is not None:
            former.replaced = True
            former.wake.set()
        self._streams[stream.router] = stream
        _log.info("router attached", router=first.router.replica_id, incarnation=short(stream.router))
        reader = asyncio.create_task(self._read(first, requests, stream), name="attach-reader")
        reader.add_done_callback(lambda _: stream.wake.set())
        try:
            yield self._stamped(decode_pb2.AttachResponse(decode=self._peer))
            while not reader.done():
                await stream.wake.wait()
                stream.wake.clear()
                if stream.replaced:
                    raise Aborted("this router has opened a newer stream")
                response = self._message(stream)
                if response is not None:
                    yield response
            reader.result()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            if self._streams.get(stream.router) is stream:
                del self._streams[stream.router]
                _log.info("router detached", incarnation=short(stream.router))

    def _message(self, stream: RouterStream) -> decode_pb2.AttachResponse | None:
        """News of the router's requests since the last message, of all unless that is very much; an empty one if it has
        waited for a word."""
        events: list[decode_pb2.RequestEvents] = []
        size = 0
        for key in tuple(stream.dirty):
            if size >= MOST_TOKENS:
                stream.wake.set()
                break
            del stream.dirty[key]
            journal = self._journals.get(key)
            if journal is None or journal.router != stream.router or journal.adopted:
                continue
            news = journal.take()
            if news is not None:
                events.append(news)
                size += sum(len(tokens.token_ids) for tokens in news.tokens)
        unknown, stream.unknown = stream.unknown, []
        overtaken, stream.overtaken = stream.overtaken, []
        now = self._clock.monotonic()
        due = stream.asked and now - stream.silent_since >= WORD_S
        stream.asked = False
        if not events and not unknown and not overtaken and not due:
            return None
        stream.silent_since = now
        return self._stamped(decode_pb2.AttachResponse(requests=events, unknown=unknown, overtaken=overtaken))

    def _stamped(self, response: decode_pb2.AttachResponse) -> decode_pb2.AttachResponse:
        load = self.reporter.load()
        if load is not None:
            response.load.CopyFrom(load)
            response.step = load.step
        return response

    # --- from the router ---------------------------------------------------------------------------------------

    async def _read(
        self,
        first: decode_pb2.AttachRequest,
        requests: AsyncIterator[decode_pb2.AttachRequest],
        stream: RouterStream,
    ) -> None:
        await self._take(first, stream, is_first=True)
        async for request in requests:
            await self._take(request, stream, is_first=False)

    async def _take(self, request: decode_pb2.AttachRequest, stream: RouterStream, *, is_first: bool) -> None:
        """A router that has lost a request to another one has no say in it: not even that its client is gone."""
        for index, cancel in enumerate(request.cancels):
            reason = reason_from_wire(cancel.reason, f"cancels[{index}].reason")
            key = request_key(cancel.id, f"cancels[{index}].id")
            journal = self._journals.get(key)
            if journal is not None:
                if journal.router != stream.router or journal.adopted:
                    continue  # the word of the stream that lost it, crossing the adoption
                journal.cancelled = True
            self.link.post(Cancel(key, reason))
        stream.asked = True
        stream.wake.set()
        keys = []
        for index, attached in enumerate(request.requests):
            key = request_key(attached.id, f"requests[{index}].id")
            journal = self._journals.get(key)
            if journal is not None and not self._goes_on(journal, attached, stream, is_first=is_first):
                continue
            keys.append(key)
        if is_first:
            self._note_ended(stream, request)
        if not keys:
            return
        for key in await self.link.call(Renew(tuple(keys))):
            if key not in self._journals:
                stream.unknown.append(attempt_id(key))
                stream.wake.set()

    def _note_ended(self, stream: RouterStream, first: decode_pb2.AttachRequest) -> None:
        """A new stream names what its router still has. The ends of others are sent all the same: as long as they are
        neither sent nor without a router, they are kept, and a drain waits for them."""
        named = {request_key(attached.id) for attached in first.requests}
        for journal in self._journals.all():
            if journal.router == stream.router and journal.ended_at is not None and journal.key not in named:
                stream.note(journal.key)

    def _goes_on(
        self, journal: RequestJournal, attached: decode_pb2.AttachedRequest, stream: RouterStream, *, is_first: bool
    ) -> bool:
        """Take what a router says of a request; whether its lease is to be renewed."""
        key = journal.key
        if journal.router != stream.router:
            stream.overtaken.append(attempt_id(key))
            return False
        if journal.adopted and not attached.received_tokens:
            return True  # the word of the stream that lost it, crossing the adoption
        if is_first or journal.adopted:
            journal.adopted = False
            if not journal.rewind(tuple(attached.received_tokens)):
                self.link.post(Cancel(key))
                self._journals.drop(key)
                stream.unknown.append(attempt_id(key))
                return False
            stream.note(key)
        journal.renewed_at = self._clock.monotonic()
        if attached.credit_tokens > journal.credit:
            journal.credit = attached.credit_tokens
            self.link.post(Credit(key, attached.credit_tokens))
        return True


async def reap_journals(hub: AttachHub, period_s: float) -> None:
    """L9: a background task on its own clock."""
    while True:
        await asyncio.sleep(period_s)
        hub.reap()
