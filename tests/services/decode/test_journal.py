"""What a router has yet to hear of one request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.messages import Finished, FinishReason, PromptCounts, TokenLogprob, Tokens, Usage
from headrace.engine.request import RequestKey
from headrace.services.decode.journal import RequestJournal, Start
from headrace.v1 import common_pb2, decode_pb2, prefill_pb2

KEY = RequestKey("r", 2)


def journal(*starts: int) -> RequestJournal:
    """Delivered tokens of each choice are 200, 201, …"""
    delivered = [Start(tuple(range(200, 200 + start))) for start in starts or (0,)]
    return RequestJournal(KEY, "router", delivered, image_tokens=7)


def add(to: RequestJournal, event: Tokens | Finished | Usage, now: float = 1.0) -> None:
    to.add(event, lambda token: bytes([token]), "decode-1", now)


def tokens(choice: int, offset: int, *ids: int) -> Tokens:
    return Tokens(KEY, choice, offset, ids, "".join(map(chr, ids)), tuple(TokenLogprob(i, -1.0) for i in ids))


def test_steps_that_wait_become_one_event_per_choice() -> None:
    """decode.proto: at most one entry per choice; text and log-probabilities stay with their tokens."""
    events = journal(0, 0)
    for event in (tokens(0, 0, 65), tokens(1, 0, 70), tokens(0, 1, 66, 67)):
        add(events, event)
    taken = events.take()
    assert taken is not None
    assert (taken.id.request_id, taken.id.attempt) == ("r", 2)
    assert [(each.choice, each.offset, list(each.token_ids), each.text) for each in taken.tokens] == [
        (0, 0, [65, 66, 67], "ABC"),
        (1, 0, [70], "F"),
    ]
    assert [each.chosen.text for each in taken.tokens[0].logprobs] == [b"A", b"B", b"C"]
    assert events.take() is None


def test_the_end_carries_what_prefill_said() -> None:
    """L27, L28: ends after tokens, then the report, once; the error travels with ERROR only."""
    events = journal()
    events.prefill.CopyFrom(prefill_pb2.PrefillReport(cached_tokens=3, computed_tokens=5, kv_bytes=99))
    add(events, tokens(0, 0, 65))
    add(events, Finished(KEY, 0, FinishReason.STOP, 1, stop_match="A"))
    assert not events.delivered
    add(events, Usage(KEY, 8, 1, PromptCounts(cached=3, computed=5), preemptions=2), now=4.0)
    taken = events.take()
    assert taken is not None
    assert taken.finished[0].stop_string == "A"
    assert not taken.finished[0].HasField("error")
    assert taken.report.prefill.kv_bytes == 99
    usage = taken.report.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens, usage.image_tokens) == (8, 3, 5, 7)
    assert (events.ended_at, events.delivered, events.take()) == (4.0, True, None)


@given(
    pieces=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    start=st.integers(0, 5),
    breaks=st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=6),
)
def test_streams_that_break_lose_and_repeat_nothing(
    pieces: list[int], start: int, breaks: list[tuple[int, bool]]
) -> None:
    """L15: whenever the stream breaks, and whether or not the last message arrived, the router ends up with every token
    exactly once, in order."""
    events = journal(start)
    got: list[int] = []
    sent = start
    pending = dict(breaks)

    def deliver(arrives: bool) -> None:
        taken = events.take()
        for each in taken.tokens if taken is not None and arrives else ():
            assert each.offset == start + len(got)
            got.extend(each.token_ids)

    for index, count in enumerate(pieces):
        add(events, tokens(0, sent, *range(sent, sent + count)))
        sent += count
        if index in pending:
            deliver(pending[index])
            events.rewind((len(got),))
    deliver(True)
    assert got == list(range(start, sent))


def test_a_new_stream_hears_of_the_end_again() -> None:
    """The message with the report may have been lost with the stream."""
    events = journal()
    add(events, tokens(0, 0, 65))
    add(events, Finished(KEY, 0, FinishReason.LENGTH, 1))
    add(events, Usage(KEY, 1, 1, PromptCounts(computed=1)))
    first = events.take()
    events.rewind((0,))
    assert events.take() == first
    events.rewind((1,))
    again = events.take()
    assert isinstance(again, decode_pb2.RequestEvents)
    assert not again.tokens
    assert again.finished[0].reason == common_pb2.FINISH_REASON_LENGTH
    assert again.HasField("report")


def test_a_router_that_takes_over_gets_what_its_client_lacks() -> None:
    """L15: the tokens before the client's offset as ids, and the events after it as they were."""
    events = journal(2)
    for event in (tokens(0, 2, 65), tokens(0, 3, 66, 67), tokens(0, 5, 68)):
        add(events, event)
    events.take()
    add(events, tokens(0, 6, 69))
    adopted = events.adopt("other", (5,), now=3.0)
    assert adopted is not None
    assert (adopted.id.request_id, adopted.id.attempt) == ("r", 2)
    assert list(adopted.choices[0].delivered_token_ids) == [200, 201, 65, 66, 67]
    assert list(adopted.received_tokens) == [3]
    assert (events.router, events.renewed_at, events.adopted) == ("other", 3.0, True)
    taken = events.take()
    assert taken is not None
    assert [(each.offset, list(each.token_ids), each.text) for each in taken.tokens] == [(5, [68, 69], "DE")]


def test_what_cannot_be_gone_on_with_is_not_handed_over() -> None:
    """Offsets inside an event, before the attempt, beyond what there is; nothing begun; a choice that failed."""
    events = journal(2)
    assert events.adopt("other", (2,), 0.0) is None
    add(events, tokens(0, 2, 65, 66))
    for offset in (1, 3, 5):
        assert events.adopt("other", (offset,), 0.0) is None
    assert events.adopt("other", (4, 0), 0.0) is None
    assert events.adopt("other", (4,), 0.0) is not None
    add(events, Finished(KEY, 0, FinishReason.CANCELLED, 2))
    assert events.adopt("other", (4,), 0.0) is None


def test_the_oldest_events_are_forgotten_once_they_were_sent() -> None:
    """A bound in tokens over all choices; what waits to be sent is never forgotten, and nobody goes on before it."""
    events = RequestJournal(KEY, "router", [Start(), Start()], image_tokens=0, most_tokens=4)
    for offset in range(6):
        add(events, tokens(0, offset, 65 + offset))
    add(events, tokens(1, 0, 90))
    taken = events.take()
    assert taken is not None
    assert sum(len(each.token_ids) for each in taken.tokens) == 7
    assert not events.rewind((2, 0))
    assert events.rewind((3, 0))
    again = events.take()
    assert again is not None
    assert [list(each.token_ids) for each in again.tokens] == [[68, 69, 70], [90]]
    assert events.adopt("other", (5, 0), 0.0) is None, "the tokens before it are not known any more"


def test_no_event_reaches_across_what_the_client_has() -> None:
    """A router leaves whole events out, so those that wait together are cut where the client's stream broke."""
    events = RequestJournal(KEY, "router", [Start(cut=2)], image_tokens=0)
    for offset in range(4):
        add(events, tokens(0, offset, 65 + offset))
    taken = events.take()
    assert taken is not None
    assert [(each.offset, each.text) for each in taken.tokens] == [(0, "AB"), (2, "CD")]
