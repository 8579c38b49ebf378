"""Each violation that the checker is there for is made once, and caught (L5, L11, L15, L27, L28)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from headrace.v1 import common_pb2, inference_pb2
from tests.chaos.checker import Answer, Books, Outcome, Watch

Event = inference_pb2.GenerateResponse
LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP


def started() -> Event:
    return Event(started=inference_pb2.StartedEvent(request_id="r", seed=1))


def tokens(choice: int, offset: int, *ids: int, text: str | None = None, logprob: float = -0.5) -> Event:
    at = [common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=each, logprob=logprob)) for each in ids]
    text = "".join(chr(97 + each) for each in ids) if text is None else text
    return Event(tokens=common_pb2.TokensEvent(choice=choice, offset=offset, token_ids=ids, text=text, logprobs=at))


def finished(choice: int, count: int, reason: int = LENGTH, stop: str = "") -> Event:
    event = common_pb2.FinishedEvent(choice=choice, reason=reason, completion_tokens=count)
    if stop:
        event.stop_string = stop
    return Event(finished=event)


def usage(completion: int, prompt: int = 9, computed: int = 5) -> Event:
    return Event(
        usage=common_pb2.Usage(
            prompt_tokens=prompt,
            cached_tokens=3,
            loaded_tokens=1,
            computed_tokens=computed,
            completion_tokens=completion,
        )
    )


def report() -> Event:
    return Event(report=inference_pb2.RequestReport(request_id="r", attempts=1))


GOOD = (
    started(),
    tokens(0, 0, 1, 2),
    tokens(1, 0, 7),
    tokens(0, 2, 3),
    finished(0, 3),
    tokens(1, 1, 8),
    finished(1, 2, STOP, "h"),
    usage(5),
    report(),
)


def seen(events: Sequence[Event], known: Answer | None) -> Watch:
    watch = Watch(2, known)
    for event in events:
        watch.take(event)
    watch.check_end()
    return watch


@pytest.fixture
def known() -> Answer:
    return seen(GOOD, None).seen


def test_a_good_stream_has_nothing_against_it(known: Answer) -> None:
    watch = seen(GOOD, known)
    assert (watch.event_errors, watch.wrong, watch.complete) == ([], [], True)
    assert watch.reasons == {LENGTH, STOP}


def replaced(index: int, *events: Event) -> tuple[Event, ...]:
    return (*GOOD[:index], *events, *GOOD[index + 1 :])


@pytest.mark.parametrize(
    ("events", "told"),
    [
        (replaced(1), "offset 2 after 0"),
        (replaced(1, GOOD[1], GOOD[1]), "offset 0 after 2"),
        (replaced(3, tokens(0, 3, 3)), "offset 3 after 2"),
        (replaced(0), "before the start"),
        (replaced(0, started(), started()), "started twice"),
        (replaced(4), "choice 0 has no terminal event"),
        (replaced(4, GOOD[4], GOOD[4]), "a second terminal event"),
        (replaced(4, GOOD[4], tokens(0, 3, 4)), "tokens after its terminal event"),
        (replaced(4, finished(0, 2)), "its end tells 2 tokens, 3 came"),
        (replaced(4, finished(0, 3, common_pb2.FINISH_REASON_UNSPECIFIED)), "no finish reason"),
        (replaced(4, GOOD[4], finished(2, 0)), "choice 2 of 2"),
        (replaced(1, GOOD[1], tokens(2, 0, 1)), "choice 2 of 2"),
        (replaced(7), "no usage record"),
        (replaced(7, usage(4)), "usage tells 4 tokens, 5 came"),
        (replaced(7, usage(5, computed=6)), "do not add up"),
        (replaced(7, usage(5), usage(5)), "usage after the usage record"),
        (replaced(7, usage(5), tokens(1, 2, 9)), "tokens after the usage record"),
        (replaced(8, report(), report()), "two reports"),
    ],
)
def test_events_that_should_not_be_are_told(events: Sequence[Event], told: str, known: Answer) -> None:
    assert any(told in error for error in seen(events, known).event_errors)


@pytest.mark.parametrize(
    "event",
    [
        tokens(0, 2, 4),
        tokens(0, 2, 3, text="?"),
        tokens(0, 2, 3, logprob=-0.25),
    ],
    ids=["another token", "another text", "another log-probability"],
)
def test_another_answer_is_wrong(event: Event, known: Answer) -> None:
    assert seen(replaced(3, event), known).wrong


def test_another_end_is_wrong(known: Answer) -> None:
    assert seen(replaced(6, finished(1, 2, STOP, "x")), known).wrong
    assert seen(replaced(6, finished(1, 2, LENGTH)), known).wrong


def test_a_wrong_token_is_told_before_the_end(known: Answer) -> None:
    """Requests that are cancelled or run into their deadline are checked as far as they came."""
    watch = Watch(2, known)
    watch.take(started())
    watch.take(tokens(0, 0, 1, 3))
    assert watch.wrong
    assert not watch.complete


def resume(at: int, then: Sequence[Event], known: Answer) -> Watch:
    watch = Watch(2, known)
    for event in GOOD[:at]:
        watch.take(event)
    watch.resumed()
    for event in then:
        watch.take(event)
    watch.check_end()
    return watch


def test_a_resumed_stream_goes_on_and_tells_every_end_again(known: Answer) -> None:
    watch = resume(6, (started(), finished(0, 3), *GOOD[6:]), known)
    assert (watch.event_errors, watch.wrong, watch.complete) == ([], [], True)
    watch = Watch(2, known)
    for event in GOOD[:4]:
        watch.take(event)
    points = {point.choice: point.resume_offset for point in watch.resume_points()}
    assert points == {0: 3, 1: 1}


@pytest.mark.parametrize(
    ("then", "told"),
    [
        (GOOD[6:], "before the start"),
        ((started(), *GOOD[6:]), "choice 0 has no terminal event"),
        ((started(), finished(0, 3, STOP), *GOOD[6:]), "when resumed"),
        ((started(), tokens(0, 3, 1), finished(0, 3), *GOOD[6:]), "tokens after its terminal event"),
        ((started(), tokens(1, 0, 7), finished(0, 3), *GOOD[6:]), "offset 0 after 2"),
    ],
)
def test_a_resumed_stream_is_held_against_the_lost_one(then: Sequence[Event], told: str, known: Answer) -> None:
    assert any(told in error for error in resume(6, then, known).event_errors)


def test_errors_of_choices_are_kept(known: Answer) -> None:
    event = common_pb2.FinishedEvent(
        choice=0,
        reason=common_pb2.FINISH_REASON_ERROR,
        completion_tokens=3,
        error=common_pb2.Error(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="nobody"),
    )
    watch = seen(replaced(4, Event(finished=event)), known)
    assert [error.message for error in watch.errors] == ["nobody"]
    assert watch.wrong


def books(*steps: Callable[[Books], None]) -> Books:
    found = Books()
    found.opened("a")
    for step in steps:
        step(found)
    return found


def test_the_books_add_up() -> None:
    found = books(lambda of: of.closed("a", Outcome.FINISHED))
    found.opened("b")
    found.closed("b", Outcome.REFUSED)
    found.opened("c")
    found.accepted("c")
    found.closed("c", Outcome.CANCELLED)
    assert found.problems() == []
    assert found.counts == {
        "accepted": 2,
        "finished": 1,
        "cancelled": 1,
        "deadline": 0,
        "failed": 0,
        "refused": 1,
    }


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ((lambda of: of.accepted("a"),), "1 accepted, 0 ended"),
        ((), "a never ended"),
        ((lambda of: of.closed("a", Outcome.FINISHED), lambda of: of.opened("a")), "asked twice"),
        ((lambda of: of.closed("a", Outcome.FINISHED), lambda of: of.closed("a", Outcome.FAILED)), "was not open"),
        ((lambda of: of.accepted("a"), lambda of: of.closed("a", Outcome.REFUSED)), "accepted and then refused"),
    ],
)
def test_books_that_do_not_add_up_say_so(steps: Sequence[Callable[[Books], None]], told: str) -> None:
    assert any(told in problem for problem in books(*steps).problems())
