"""Requests without a router: kept for a while, handed over to the one that asks, ended then (L8, L15, L16)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine.messages import Cancel, Credit, Finished, FinishReason, PromptCounts, Renew, Tokens, Usage
from headrace.engine.request import RequestKey
from headrace.services.decode import attach
from headrace.services.decode.attach import AttachHub
from headrace.services.decode.journal import RequestJournal, Start
from headrace.services.decode.journals import Journals
from headrace.services.runtime.clock import ManualClock
from headrace.v1 import common_pb2, decode_pb2

OLD, NEW = "old-router", "new-router"
CONTENT = b"what is asked for"


class Link:
    """Keeps what the engine is told, and knows every request."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def post(self, command: object) -> None:
        self.told.append(command)

    async def call(self, command: Any) -> tuple[RequestKey, ...]:
        self.told.append(command)
        return ()


class Hub:
    """A hub over a clock that is turned by hand, and its streams."""

    def __init__(self) -> None:
        self.clock, self.link = ManualClock(100.0), Link()
        self.journals = Journals(linger_s=5.0, orphan_s=10.0, lease_s=3.0)
        peer = common_pb2.PeerId(replica_id="decode", incarnation="d")
        self.hub = AttachHub(peer, lambda token: b"", self.clock, self.journals)
        self.hub.link = self.link  # type: ignore[assignment]
        self.hub.reporter = SimpleNamespace(load=lambda: None, refresh=lambda: None)  # type: ignore[assignment]

    def begin(
        self,
        name: str = "r",
        attempt: int = 1,
        router: str = OLD,
        content: bytes = CONTENT,
        delivered: tuple[int, ...] = (),
    ) -> RequestKey:
        key = RequestKey(name, attempt)
        now = self.clock.monotonic()
        self.hub.begin(RequestJournal(key, router, [Start(delivered)], 0, content=content, now=now))
        return key

    def brings(self, key: RequestKey, offset: int, *ids: int) -> None:
        self.hub.on_events((Tokens(key, 0, offset, ids, "x" * len(ids), ()),))

    def ends(self, key: RequestKey) -> None:
        usage = Usage(key, 1, 1, PromptCounts(computed=1))
        self.hub.on_events((Finished(key, 0, FinishReason.LENGTH, 1), usage))

    def attach(self, router: str, *named: decode_pb2.AttachedRequest) -> Stream:
        return Stream(self.hub, router, named)


class Stream:
    """A router's stream."""

    def __init__(self, hub: AttachHub, router: str, named: tuple[decode_pb2.AttachedRequest, ...]) -> None:
        self._says: asyncio.Queue[decode_pb2.AttachRequest] = asyncio.Queue()
        peer = common_pb2.PeerId(replica_id=router, incarnation=router)
        self._says.put_nowait(decode_pb2.AttachRequest(router=peer, requests=named))
        self._responses = hub.attach(self._requests())

    async def _requests(self) -> Any:
        while True:
            yield await self._says.get()

    def say(self, *named: decode_pb2.AttachedRequest, cancel: RequestKey | None = None) -> None:
        cancels = []
        if cancel is not None:
            identifier = common_pb2.AttemptId(request_id=cancel.request_id, attempt=cancel.attempt)
            cancels = [decode_pb2.AttachCancel(id=identifier, reason=common_pb2.FINISH_REASON_CANCELLED)]
        self._says.put_nowait(decode_pb2.AttachRequest(requests=named, cancels=cancels))

    async def next(self) -> decode_pb2.AttachResponse:
        return await asyncio.wait_for(anext(self._responses), 20.0)

    async def close(self) -> None:
        await self._responses.aclose()


def attached(key: RequestKey, credit: int = 100, *received: int) -> decode_pb2.AttachedRequest:
    identifier = common_pb2.AttemptId(request_id=key.request_id, attempt=key.attempt)
    return decode_pb2.AttachedRequest(id=identifier, credit_tokens=credit, received_tokens=received)


def test_an_orphan_is_renewed_for_its_time_and_no_longer() -> None:
    """L8: its lease, which the engine keeps, ends it 10 s after the router's last word. What has brought nothing yet is
    not kept; what ended needs no lease."""
    site = Hub()
    begun, idle, over = site.begin("begun"), site.begin("idle"), site.begin("over")
    for key in (begun, over):
        site.brings(key, 0, 1)
    site.ends(over)
    renewed = []
    for second in range(1, 13):
        site.clock.advance(1.0)
        site.link.told.clear()
        site.hub.reap()
        if site.link.told:
            assert site.link.told == [Renew((begun,))]
            renewed.append(second)
    assert idle in site.journals
    assert renewed == [2, 3, 4, 5, 6, 7]


async def test_a_live_router_keeps_its_requests() -> None:
    """L8: a request that is named is no orphan, however old."""
    site = Hub()
    key = site.begin()
    site.brings(key, 0, 1)
    site.clock.advance(9.0)
    stream = site.attach(OLD, attached(key))
    await stream.next()
    await stream.next()
    site.link.told.clear()
    site.hub.reap()
    assert site.link.told == []
    await stream.close()


async def test_every_word_is_answered() -> None:
    """L15: a router takes silence for a standstill, so it gets an empty message where there is no news."""
    site = Hub()
    stream = site.attach(OLD)
    first = await stream.next()
    assert first.decode.replica_id == "decode"
    site.clock.advance(1.0)
    stream.say()
    answer = await stream.next()
    assert not answer.requests
    await stream.close()


async def test_an_orphan_goes_to_the_router_that_asks() -> None:
    """L15, L16: nothing is sent before the new router names it; the old one, if it lives, is told that it has lost it
    and cannot take it back."""
    site = Hub()
    key = site.begin()
    for offset in range(3):
        site.brings(key, offset, 10 + offset)
    old, new = site.attach(OLD, attached(key)), site.attach(NEW)
    await old.next()
    assert (await old.next()).requests[0].tokens[0].token_ids == [10, 11, 12]
    await new.next()
    adopted = site.hub.adopt("r", CONTENT, [2], NEW, content_of)
    assert list(adopted.choices[0].delivered_token_ids) == [10, 11]
    assert (await old.next()).overtaken[0].request_id == "r"
    site.brings(key, 3, 13)
    old.say(attached(key, 900))
    assert (await old.next()).overtaken[0].request_id == "r"
    assert not any(isinstance(command, Credit) and command.limit == 900 for command in site.link.told)
    new.say(attached(key, 50, *adopted.received_tokens))
    (events,) = (await new.next()).requests
    assert [(each.offset, list(each.token_ids)) for each in events.tokens] == [(2, [12, 13])]
    await old.close()
    await new.close()


def test_what_cannot_be_handed_over_is_ended() -> None:
    """L16: the attempt that follows is the only one: older attempts and single choices of the request end."""
    site = Hub()
    older, newer, single = site.begin(attempt=1), site.begin(attempt=2), site.begin("r/1", 3)
    site.brings(older, 0, 1)
    adopted = site.hub.adopt("r", CONTENT, [5, 5], NEW, lambda choice: CONTENT)
    assert not adopted.HasField("id")
    assert {command.key for command in site.link.told if isinstance(command, Cancel)} == {older, newer, single}


def test_the_newest_attempt_is_handed_over() -> None:
    site = Hub()
    older, newer = site.begin(attempt=1), site.begin(attempt=2)
    for key in (older, newer):
        site.brings(key, 0, 1)
    adopted = site.hub.adopt("r", CONTENT, [1], NEW, content_of)
    assert adopted.id.attempt == 2
    assert [command.key for command in site.link.told if isinstance(command, Cancel)] == [older]


def content_of(choice: int) -> bytes:
    return b"choice %d" % choice


async def test_choices_that_are_continued_by_themselves_are_handed_over_one_by_one() -> None:
    """L15, L16: each after what the client has of it. Of one that was made here from later tokens on, nothing can be
    sent again; it ends, as does the whole that they once were, and what an older attempt at a choice still makes."""
    site = Hub()
    whole, former = site.begin("r", 1), site.begin("r/0", 2, content=content_of(0))
    zero = site.begin("r/0", 3, content=content_of(0), delivered=(5, 6))
    one = site.begin("r/1", 4, content=content_of(1), delivered=(7, 8, 9))
    foreign = site.begin("r/2", 9, content=b"another prompt")
    site.brings(former, 0, 5)
    for offset in (2, 3):
        site.brings(zero, offset, 10 + offset)
    site.brings(one, 3, 20)
    site.brings(foreign, 0, 30)
    adopted = site.hub.adopt("r", CONTENT, [3, 2, 0], NEW, content_of)
    assert not adopted.HasField("id")
    assert adopted.highest_attempt == 9
    (single,) = adopted.single
    assert (single.id.request_id, single.id.attempt, single.state.choice, single.received_tokens) == ("r/0", 3, 0, 1)
    assert list(single.state.delivered_token_ids) == [5, 6, 12]
    assert {each.key for each in site.link.told if isinstance(each, Cancel)} == {whole, former, one}
    new = site.attach(NEW)
    await new.next()
    new.say(attached(zero, 50, single.received_tokens))
    (events,) = (await new.next()).requests
    assert [(each.offset, list(each.token_ids)) for each in events.tokens] == [(3, [13])]
    await new.close()


def test_a_whole_attempt_is_handed_over_before_its_choices() -> None:
    """L16: the choices end."""
    site = Hub()
    whole, single = site.begin("r", 1), site.begin("r/0", 2, content=content_of(0))
    site.brings(whole, 0, 1)
    site.brings(single, 0, 1)
    adopted = site.hub.adopt("r", CONTENT, [1], NEW, content_of)
    assert (adopted.id.attempt, len(adopted.single), adopted.highest_attempt) == (1, 0, 2)
    assert [each.key for each in site.link.told if isinstance(each, Cancel)] == [single]


def test_another_request_of_the_name_is_not_found() -> None:
    """L25: the digest has tenant, prompt and seed; whoever asks for something else learns nothing and ends nothing."""
    site = Hub()
    key = site.begin()
    site.brings(key, 0, 1)
    site.begin("r/1", 2, content=content_of(1))  # of a request with more choices
    assert not site.hub.adopt("r", b"something else", [1], NEW, content_of).HasField("id")
    assert site.hub.adopt("unknown", CONTENT, [1], NEW, content_of) == decode_pb2.AdoptResponse()
    assert site.link.told == []
    journal = site.journals.get(key)
    assert journal is not None
    assert journal.router == OLD


def test_ends_that_nobody_took_are_kept_for_a_client_that_resumes() -> None:
    """L15, L9: the router died before it had them; after the orphan's time they go."""
    site = Hub()
    key = site.begin()
    site.brings(key, 0, 1)
    site.ends(key)
    site.clock.advance(9.0)
    site.hub.reap()
    assert site.hub.adopt("r", CONTENT, [1], NEW, content_of).HasField("id")
    site.clock.advance(2.0)
    site.hub.reap()
    assert len(site.journals) == 0


async def test_what_has_waited_comes_in_bounded_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """L12, L15: a router that stood still attaches again. One message of all that waits could exceed the limit of gRPC,
    break the stream, and be sent again, for ever."""
    monkeypatch.setattr(attach, "MOST_TOKENS", 4)
    site = Hub()
    keys = [site.begin(f"r{index}") for index in range(5)]
    for key in keys:
        site.brings(key, 0, 1, 2, 3)
    stream = site.attach(OLD, *(attached(key) for key in keys))
    await stream.next()
    sizes: list[int] = []
    while sum(sizes) < 5:
        sizes.append(len((await stream.next()).requests))
    assert sizes == [2, 2, 1]
    await stream.close()


async def test_a_router_that_lost_a_request_cannot_cancel_it() -> None:
    """L15, L16: the old router notices late that its client is gone, and says so; the client is at another one."""
    site = Hub()
    key = site.begin()
    site.brings(key, 0, 1)
    old, new = site.attach(OLD, attached(key)), site.attach(NEW)
    await old.next()
    await old.next()
    await new.next()
    assert site.hub.adopt("r", CONTENT, [1], NEW, content_of).HasField("id")
    old.say(cancel=key)
    while not (await old.next()).overtaken:
        old.say()
    new.say(cancel=key)  # of an earlier stream of the same router, before it names what it has adopted
    new.say(attached(key, 100, 1))
    site.clock.advance(1.0)
    await new.next()
    assert not any(isinstance(command, Cancel) for command in site.link.told)
    new.say(cancel=key)
    site.clock.advance(1.0)
    await new.next()
    assert Cancel(key, FinishReason.CANCELLED) in site.link.told
    await old.close()
    await new.close()


async def test_who_lost_an_attempt_that_was_left_hears_so_when_it_attaches_again() -> None:
    """L16: its client is at another router, and what comes of the attempt is no reason to try again."""
    site = Hub()
    key = site.begin()  # nothing has come of it yet: no use to the new router
    new = site.attach(NEW)
    await new.next()
    assert not site.hub.adopt("r", CONTENT, [0], NEW, content_of).HasField("id")
    old = site.attach(OLD, attached(key))
    while not (response := await old.next()).overtaken:
        assert not response.requests
    site.hub.on_events((Finished(key, 0, FinishReason.CANCELLED, 0), Usage(key, 1, 0, PromptCounts())))
    while not (response := await new.next()).requests:
        new.say()
    assert site.hub.undelivered == 0
    await old.close()
    await new.close()


async def test_a_request_that_was_cancelled_is_not_handed_over() -> None:
    """L15: the engine has yet to say that it has ended; its client, who is back, would get that end for its own."""
    site = Hub()
    key = site.begin()
    site.brings(key, 0, 1)
    old = site.attach(OLD, attached(key))
    await old.next()
    await old.next()
    old.say(cancel=key)
    site.clock.advance(1.0)
    await old.next()
    assert not site.hub.adopt("r", CONTENT, [1], NEW, content_of).HasField("id")
    await old.close()


async def test_ends_that_a_new_stream_does_not_name_are_sent_and_forgotten() -> None:
    """L9, L19: a router gives a request up while its stream is broken; nothing waits for it for ever."""
    site = Hub()
    given_up, kept = site.begin("given-up"), site.begin("kept")
    site.ends(given_up)
    site.ends(kept)
    stream = site.attach(OLD, attached(kept))
    await stream.next()
    told = (await stream.next()).requests
    assert {events.id.request_id for events in told} == {"given-up", "kept"}
    assert site.hub.undelivered == 0
    site.clock.advance(5.0)
    site.hub.reap()
    assert given_up not in site.journals
    await stream.close()


async def test_an_adopter_that_never_comes_is_not_waited_for() -> None:
    """L8, L9: it asked for a request, and its stream, which is there, never names it."""
    site = Hub()
    key = site.begin()
    site.brings(key, 0, 1)
    stream = site.attach(NEW)
    await stream.next()
    assert site.hub.adopt("r", CONTENT, [0], NEW, content_of).HasField("id")
    site.ends(key)
    for seconds, there in ((9.0, True), (1.0, False)):
        site.clock.advance(seconds)
        site.hub.reap()
        assert (key in site.journals) is there
    assert site.hub.undelivered == 0
    await stream.close()
