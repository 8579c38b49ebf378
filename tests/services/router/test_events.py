"""EventStream: decode's events as a client's, with exactly one terminal event per choice (L28)."""

from __future__ import annotations

import pytest

from headrace.router.request import RoutingRequest
from headrace.services.router.event_stream import EventStream
from headrace.services.router.place import Placed
from headrace.services.router.report import RequestLog
from headrace.services.runtime.clock import ManualClock
from headrace.services.runtime.errors import Cancelled, DeadlineExceeded, HeadraceError, Unavailable, to_proto
from headrace.v1 import common_pb2, decode_pb2, prefill_pb2


def stream(choices: int = 2, report: bool = True) -> tuple[EventStream, ManualClock]:
    clock = ManualClock()
    spec = common_pb2.RequestSpec(
        id=common_pb2.AttemptId(request_id="r"), sampling=common_pb2.SamplingParams(seed=3), prompt_tokens=10
    )
    routing = RoutingRequest("r", 10, 4, choices, 0, b"k", 0, 100.0)
    log = RequestLog(arrived=0.0)
    return EventStream(Placed(spec, routing, 0), log, report, clock), clock


def tokens(choice: int, *ids: int) -> decode_pb2.RequestEvents:
    return decode_pb2.RequestEvents(tokens=[common_pb2.TokensEvent(choice=choice, token_ids=ids)])


def finished(choice: int) -> common_pb2.FinishedEvent:
    return common_pb2.FinishedEvent(choice=choice, reason=common_pb2.FINISH_REASON_STOP)


def kinds(responses: list) -> list[str]:  # type: ignore[type-arg]
    return [response.WhichOneof("event") for response in responses]


def test_started_once_then_terminals_usage_report() -> None:
    events, clock = stream()
    clock.advance(0.5)
    assert kinds(events.translate(tokens(0, 1))) == ["started", "tokens"]
    clock.advance(1.0)
    assert kinds(events.translate(tokens(1, 2))) == ["tokens"]
    end = decode_pb2.RequestEvents(
        finished=[finished(0), finished(1), finished(0)],
        report=decode_pb2.DecodeReport(usage=common_pb2.Usage(prompt_tokens=10, computed_tokens=10)),
    )
    last = events.translate(end)
    assert kinds(last) == ["finished", "finished", "usage", "report"]
    report = last[-1].report
    assert report.times.first_token_us == 500_000
    assert report.times.total_us == 1_500_000
    assert report.usage.computed_tokens == 10


def test_failure_after_the_first_event_ends_open_choices_only() -> None:
    """L28, L27: one terminal event per choice with the typed error; the usage still adds up to the prompt."""
    events, _ = stream()
    events.translate(tokens(0, 1))
    events.translate(decode_pb2.RequestEvents(finished=[finished(0)]))
    prefill = prefill_pb2.PrefillReport(cached_tokens=4, computed_tokens=6)
    out = events.failed(Unavailable("decode is gone"), prefill)
    assert kinds(out) == ["finished", "usage", "report"]
    assert out[0].finished.choice == 1
    assert out[0].finished.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
    usage = out[1].usage
    assert usage.cached_tokens + usage.loaded_tokens + usage.computed_tokens == usage.prompt_tokens
    assert events.failed(Unavailable("again"), prefill)[0].WhichOneof("event") == "usage"


def test_deadline_after_the_first_event_is_a_reason_of_its_own() -> None:
    events, _ = stream(choices=1, report=False)
    events.translate(tokens(0, 1))
    out = events.failed(DeadlineExceeded("late"), prefill_pb2.PrefillReport(computed_tokens=10))
    assert kinds(out) == ["finished", "usage"]
    assert out[0].finished.reason == common_pb2.FINISH_REASON_DEADLINE
    assert out[0].finished.completion_tokens == 1


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (common_pb2.FINISH_REASON_DEADLINE, DeadlineExceeded),
        (common_pb2.FINISH_REASON_CANCELLED, Cancelled),
        (common_pb2.FINISH_REASON_ERROR, Unavailable),
    ],
)
def test_an_end_before_the_first_token_is_a_status(
    reason: common_pb2.FinishReason.ValueType, error: type[HeadraceError]
) -> None:
    """Errors before the first event are statuses, and nothing has reached the client (L16)."""
    events, _ = stream()
    wire = to_proto(Unavailable("x")) if reason == common_pb2.FINISH_REASON_ERROR else None
    end = common_pb2.FinishedEvent(choice=0, reason=reason, error=wire)
    with pytest.raises(error):
        events.translate(decode_pb2.RequestEvents(finished=[end], report=decode_pb2.DecodeReport()))
    assert not events.started
