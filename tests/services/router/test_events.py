"""EventStream: decode's events as a client's, with exactly one terminal event per choice (L28)."""

from __future__ import annotations

import pytest

from headrace.router.request import RoutingRequest
from headrace.services.router.attach import Overtaken
from headrace.services.router.event_stream import EventStream
from headrace.services.router.parts import Part
from headrace.services.router.place import Placed
from headrace.services.router.report import RequestLog
from headrace.services.runtime.clock import ManualClock
from headrace.services.runtime.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    Internal,
    InvalidArgument,
    Unavailable,
    to_proto,
)
from headrace.v1 import common_pb2, decode_pb2, prefill_pb2


def stream(
    choices: int = 2, report: bool = True, received: dict[int, int] | None = None
) -> tuple[EventStream, ManualClock, Part]:
    """A stream, its clock, and the part that makes all of its choices in attempt 1."""
    clock = ManualClock()
    spec = common_pb2.RequestSpec(
        id=common_pb2.AttemptId(request_id="r@t"),
        sampling=common_pb2.SamplingParams(seed=3, n=choices),
        prompt_tokens=10,
        choices=[common_pb2.ChoiceState(choice=index, seed=100 + index) for index in range(choices)],
    )
    placed = Placed(spec, RoutingRequest("r", 10, 8, choices, 0, b"k", 100.0), 0)
    events = EventStream(placed, RequestLog(arrived=0.0), report, clock, name="r", received=received)
    part = Part(placed, tuple(range(choices)), attempt=1)
    events.begin(part)
    return events, clock, part


def tokens(choice: int, offset: int, *ids: int) -> decode_pb2.RequestEvents:
    return decode_pb2.RequestEvents(tokens=[common_pb2.TokensEvent(choice=choice, offset=offset, token_ids=ids)])


def finished(choice: int, total: int = 1) -> common_pb2.FinishedEvent:
    return common_pb2.FinishedEvent(choice=choice, reason=common_pb2.FINISH_REASON_STOP, completion_tokens=total)


def ended(*choices: int, computed: int = 10, recomputed: int = 0) -> decode_pb2.RequestEvents:
    usage = common_pb2.Usage(prompt_tokens=10, computed_tokens=computed, recomputed_tokens=recomputed)
    report = decode_pb2.DecodeReport(usage=usage)
    return decode_pb2.RequestEvents(finished=[finished(choice) for choice in choices], report=report)


def kinds(responses: list) -> list[str]:  # type: ignore[type-arg]
    return [response.WhichOneof("event") for response in responses]


def sent(responses: list) -> list[int]:  # type: ignore[type-arg]
    return [token for response in responses for token in response.tokens.token_ids]


def test_started_once_then_terminals_usage_report() -> None:
    events, clock, part = stream()
    clock.advance(0.5)
    first = events.translate(tokens(0, 0, 1), part)
    assert kinds(first) == ["started", "tokens"]
    assert first[0].started.request_id == "r", "the client's own name for it"
    clock.advance(1.0)
    assert kinds(events.translate(tokens(1, 0, 2), part)) == ["tokens"]
    step = ended(0, 1)
    step.finished.add().CopyFrom(finished(0))
    assert kinds(events.translate(step, part)) == ["finished", "finished"]
    last = events.end()
    assert kinds(last) == ["usage", "report"]
    report = last[-1].report
    assert report.times.first_token_us == 500_000
    assert report.times.total_us == 1_500_000
    assert report.usage.computed_tokens == 10
    assert report.usage.completion_tokens == 2


def test_failure_after_the_first_event_ends_open_choices_only() -> None:
    """L28, L27: one terminal event per choice with the typed error; the usage still adds up to the prompt."""
    events, _, part = stream()
    events.translate(tokens(0, 0, 1), part)
    events.translate(decode_pb2.RequestEvents(finished=[finished(0)]), part)
    events.lost(prefill_pb2.PrefillReport(cached_tokens=4, computed_tokens=6))
    out = events.failed(Unavailable("decode is gone"), part.choices)
    assert kinds(out) == ["finished"]
    assert out[0].finished.choice == 1
    assert out[0].finished.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert events.failed(Unavailable("again"), part.choices) == []
    usage = events.end()[0].usage
    assert (usage.cached_tokens, usage.loaded_tokens, usage.computed_tokens) == (4, 0, 6)


def test_deadline_after_the_first_event_is_a_reason_of_its_own() -> None:
    events, _, part = stream(choices=1, report=False)
    events.translate(tokens(0, 0, 1), part)
    out = events.failed(DeadlineExceeded("late"), part.choices)
    assert out[0].finished.reason == common_pb2.FINISH_REASON_DEADLINE
    assert out[0].finished.completion_tokens == 1
    assert kinds(events.end()) == ["usage"]


def test_a_continuation_goes_on_at_the_next_offset_and_older_attempts_are_fenced() -> None:
    """L15, L16, L27: no token twice, none lost; what an older attempt still says does not pass; what was computed again
    stands apart from the prompt's origins, which are the first attempt's."""
    events, _, first = stream(choices=1)
    events.translate(tokens(0, 0, 1, 2), first)
    events.lost(prefill_pb2.PrefillReport(cached_tokens=4, computed_tokens=6))
    second = Part(first.placed, (0,), attempt=2)
    spec = second.after(events.known).spec
    assert list(spec.choices[0].delivered_token_ids) == [1, 2]
    events.begin(second)
    assert events.translate(tokens(0, 2, 9), first) == []
    assert events.translate(decode_pb2.RequestEvents(finished=[finished(0)]), first) == []
    assert sent(events.translate(tokens(0, 2, 3), second)) == [3]
    assert events.translate(tokens(0, 1, 2, 3), second) == []
    with pytest.raises(Internal, match="3 are known"):
        events.translate(tokens(0, 4, 5), second)
    events.translate(ended(0, computed=7, recomputed=2), second)
    usage = events.end()[0].usage
    assert (usage.cached_tokens, usage.computed_tokens, usage.recomputed_tokens) == (4, 6, 9)


def test_choices_are_continued_one_by_one() -> None:
    """L15: n = 3 of which one has ended: the others become requests of one choice, with their own seeds and tokens."""
    events, _, whole = stream(choices=3)
    events.translate(tokens(2, 0, 7, 8), whole)
    events.translate(decode_pb2.RequestEvents(finished=[finished(1)]), whole)
    assert events.open == (0, 2)
    part = whole.single(2)
    part.attempt += 1
    placed = part.after(events.known)
    assert (placed.spec.id.request_id, placed.spec.sampling.n, placed.spec.sampling.seed) == ("r@t/2", 1, 102)
    assert [(each.choice, each.seed, list(each.delivered_token_ids)) for each in placed.spec.choices] == [
        (0, 102, [7, 8])
    ]
    assert (placed.routing.choices, placed.routing.prompt_tokens, placed.routing.max_tokens) == (1, 12, 6)
    events.begin(part)
    (event,) = events.translate(tokens(0, 2, 9), part)
    assert (event.tokens.choice, event.tokens.offset) == (2, 2)


def test_what_a_worker_says_as_it_gives_up_is_not_passed_on() -> None:
    """L15: tokens that were held back for a stop string come with the failure; the continuation decides about them."""
    events, _, part = stream(choices=1)
    events.translate(tokens(0, 0, 1), part)
    step = tokens(0, 1, 2)
    error = to_proto(Unavailable("this worker stops"))
    step.finished.add().CopyFrom(common_pb2.FinishedEvent(choice=0, reason=common_pb2.FINISH_REASON_ERROR, error=error))
    with pytest.raises(Unavailable):
        events.translate(step, part)
    assert events.known[0] == [1]
    assert events.open == (0,)


@pytest.mark.parametrize(
    ("why", "raised"), [(Aborted("newer"), Overtaken), (Cancelled("lease"), Unavailable), (None, Unavailable)]
)
def test_why_decode_cancelled_decides_what_follows(why: HeadraceError | None, raised: type[HeadraceError]) -> None:
    """L16: a newer attempt is the end; a lease that ran out, since this router stood still, is repeated, and so is what
    somebody cancelled at decode: not the client, with whose cancel nobody follows the attempt."""
    events, _, part = stream(choices=1)
    events.translate(tokens(0, 0, 1), part)
    wire = None if why is None else to_proto(why)
    end = common_pb2.FinishedEvent(reason=common_pb2.FINISH_REASON_CANCELLED, error=wire)
    with pytest.raises(raised):
        events.translate(decode_pb2.RequestEvents(finished=[end]), part)


def test_a_client_that_resumes_gets_what_it_lacks() -> None:
    """L15: events before its offset are left out whole, and their tokens count as computed again."""
    events, _, part = stream(choices=1, received={0: 3})
    assert events.translate(tokens(0, 0, 1, 2), part) == []
    assert events.translate(tokens(0, 2, 3), part) == []
    assert not events.started
    assert kinds(events.translate(tokens(0, 3, 4), part)) == ["started", "tokens"]
    assert list(events.known[0]) == [1, 2, 3, 4]
    events.translate(ended(0), part)
    assert events.end()[0].usage.recomputed_tokens == 3


def test_an_offset_inside_an_event_is_the_clients_mistake() -> None:
    events, _, part = stream(choices=1, received={0: 1})
    with pytest.raises(InvalidArgument, match="resume"):
        events.translate(tokens(0, 0, 1, 2), part)


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (common_pb2.FINISH_REASON_DEADLINE, DeadlineExceeded),
        (common_pb2.FINISH_REASON_CANCELLED, Unavailable),
        (common_pb2.FINISH_REASON_ERROR, Unavailable),
    ],
)
def test_an_end_before_the_first_token_is_a_status(
    reason: common_pb2.FinishReason.ValueType, error: type[HeadraceError]
) -> None:
    """Errors before the first event are statuses, and nothing has reached the client (L16)."""
    events, _, part = stream()
    wire = to_proto(Unavailable("x")) if reason == common_pb2.FINISH_REASON_ERROR else None
    end = common_pb2.FinishedEvent(choice=0, reason=reason, error=wire)
    with pytest.raises(error):
        events.translate(decode_pb2.RequestEvents(finished=[end], report=decode_pb2.DecodeReport()), part)
    assert not events.started
