"""Every bar of a soak can be missed, and says so (Show 1: a check that cannot fail is none)."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.v1 import common_pb2, inference_pb2
from tests.chaos.checker import Books, Outcome, Watch
from tests.chaos.clients import Trace
from tests.chaos.faults import Done
from tests.chaos.leaks import Footprint
from tests.chaos.results import LONG_BARS, Bars, after_decode_death, conclude, missed, percentiles
from tests.chaos.round import Found
from tests.chaos.schedule import Ask, Fault, Kind, Manner

KINDS = ("router", "encoder", "prefill", "decode", "redis", "etcd")
GOOD: dict[str, Any] = {
    "accepted": 530,
    "finished": 500,
    "cancelled": 20,
    "deadline": 10,
    "failed": 0,
    "wrong_tokens": 0,
    "event_errors": 0,
    "leaks": 0,
    "faults": 100,
    "kills": 40,
    "faults_in_flight": 100,
    "kills_by_process": dict.fromkeys(KINDS, 3),
    "rss_growth": {"decode-0": 1.05},
    "problems": [],
    "at_routers": {"router-0": {"finished": 500, "unavailable": 18}},
}


def test_a_good_soak_misses_nothing() -> None:
    assert missed(GOOD, LONG_BARS, KINDS) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"failed": 1, "finished": 499}, "failed: 1, not 0"),
        ({"wrong_tokens": 1}, "wrong_tokens: 1, not 0"),
        ({"event_errors": 2}, "event_errors: 2, not 0"),
        ({"leaks": 1}, "leaks: 1, not 0"),
        ({"accepted": 531}, "accepted 531, ended 530"),
        ({"problems": ["decode-0 ended by itself"]}, "decode-0 ended by itself"),
        ({"at_routers": {"router-0": {"failed": 1}}}, "router-0 failed 1"),
        ({"faults": 99}, "faults: 99 of 100"),
        ({"kills": 39}, "kills: 39 of 40"),
        ({"finished": 499, "cancelled": 21}, "finished: 499 of 500"),
        ({"faults_in_flight": 99}, "faults_in_flight: 99 of 100"),
        ({"kills_by_process": dict.fromkeys(KINDS[1:], 3)}, "kills of router: 0 of 3"),
        ({"rss_growth": {"decode-0": 1.051}}, "RSS of decode-0 grew"),
    ],
)
def test_every_bar_can_be_missed(change: dict[str, Any], told: str) -> None:
    assert any(told in text for text in missed(GOOD | change, LONG_BARS, KINDS))


def footprints(*samples: tuple[float, int, int]) -> list[Footprint]:
    """(age, KiB, descriptors) of a process."""
    return [Footprint(7, at, kib, descriptors, {"socket": descriptors}) for at, kib, descriptors in samples]


def trace(name: int, outcome: Outcome, *, wrong: bool = False, error: bool = False) -> Trace:
    watch = Watch(1, None)
    watch.wrong += ["another token"] * wrong
    watch.event_errors += ["an event twice"] * error
    asked = Ask(0, name, 0, Manner.PLAIN, 1, 1.0, 0)
    return Trace(asked, 0.0, watch, closed=100.0, outcome=outcome, reason="for a reason")


def round_of(*traces: Trace) -> Found:
    found = Found("v3", 60.0, Books(), list(traces))
    for each in traces:
        assert each.outcome is not None
        found.books.opened(each.ask.name)
        found.books.closed(each.ask.name, each.outcome)
    return found


def test_what_rounds_found_is_told() -> None:
    good, bad = round_of(trace(1, Outcome.FINISHED)), round_of(trace(2, Outcome.FAILED), trace(3, Outcome.FINISHED))
    bad.traces[1].watch.wrong.append("another token")
    bad.leaks.append("decode-0: 1 requests live")
    result = conclude(1, [good, bad], Bars())
    counts = [result[name] for name in ("accepted", "finished", "failed", "wrong_tokens", "event_errors", "leaks")]
    assert counts == [3, 2, 1, 1, 0, 1]
    assert result["failures"] == ["chaos-0-2 (plain): for a reason"]
    assert len(result["missed"]) == 3
    never = round_of()
    never.books.opened("r")
    assert any("never ended" in text for text in conclude(1, [never], Bars())["missed"])
    assert conclude(1, [round_of(trace(4, Outcome.FINISHED, error=True))], Bars())["event_errors"] == 1


def test_old_processes_may_not_grow() -> None:
    found = round_of()
    found.footprints = {
        "young": footprints((0, 100, 10), (80, 100, 10), (179, 900, 99)),
        "steady": footprints((0, 10, 10), (80, 100, 10), (181, 105, 12)),
        "growing": footprints((0, 100, 10), (80, 100, 10), (181, 106, 10)),
        "holding": footprints((0, 100, 10), (80, 100, 10), (181, 100, 19)),
    }
    result = conclude(1, [found], Bars())
    assert result["rss_growth"] == {"v3 steady": 1.05, "v3 growing": 1.06, "v3 holding": 1.0}
    assert [text.partition(" grew")[0] for text in result["missed"] if "RSS" in text] == ["RSS of v3 growing"]
    assert [text.partition(": d")[0] for text in result["leaked"]] == ["v3: holding"]


def test_the_wait_after_the_death_of_decode() -> None:
    """From the kill, over what was on its way, to the first token of the next attempt."""
    one = trace(1, Outcome.FINISHED)
    one.arrivals = [1.0, 2.0, 3.1, 5.5, 5.6]
    replicas = [
        inference_pb2.ReplicaReport(peer=common_pb2.PeerId(incarnation=life), attempt=attempt)
        for life, attempt in (("a", 1), ("b", 2))
    ]
    one.watch.report = inference_pb2.RequestReport(replicas=replicas)
    found = round_of(one)
    kill = Fault(0.0, "decode", Kind.KILL, "decode-1")
    found.done = [Done(kill, 3.0, 1, "a"), Done(kill, 3.0, 1, "other"), Done(kill, 200.0, 1, "a")]
    assert after_decode_death(found) == [pytest.approx(2.4)]
    assert percentiles([1.0, 3.0])["p50"] == 2.0
    assert percentiles([]) == {"count": 0}
