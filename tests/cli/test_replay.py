"""Replaying a trace: times and bounds with a clock of our own, prompts, and once against a tiny cluster."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest

from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.exits import CliError, Exit
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.replay import ReplayOptions, Result, play, replay
from headrace.cli.replay_prompts import Prompts, Scale
from headrace.router.simulate.generated import Shape, generate, write_trace
from headrace.router.simulate.traces import Trace, TraceFormat, TraceRow


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def rows(*times: float) -> list[TraceRow]:
    return [TraceRow(at, 100, 10) for at in times]


def test_requests_go_at_their_times_divided_by_the_speed() -> None:
    time, sent = FakeTime(), dict[int, float]()

    def send(number: int, row: TraceRow, late: float) -> Result:
        sent[number] = late
        return Result(late)

    results = play(rows(0, 0, 3, 9), 2.0, 4, send, now=lambda: time.now, sleep=time.sleep)
    assert time.slept == [1.5, 3.0]
    assert len(results.rows) == len(sent) == 4
    assert results.seconds == 4.5


def test_no_more_than_allowed_are_under_way_and_none_is_lost() -> None:
    """L12: what comes then waits, and is told as late."""
    running, most, lock = 0, 0, threading.Lock()

    def send(number: int, row: TraceRow, late: float) -> Result:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1
        return Result(late)

    assert len(play(rows(*[0.0] * 50), 1.0, 3, send).rows) == 50
    assert 1 <= most <= 3


def test_equal_blocks_are_equal_tokens_and_others_are_not() -> None:
    prompts = Prompts(100, {7}, 512, Scale(0.125, 0.1, 4096, 64), seed=1)
    one = prompts.prompt(0, TraceRow(0, 1100, 100, (1, 2, 3)))
    other = prompts.prompt(1, TraceRow(0, 1600, 100, (1, 2, 4, 5)))
    assert len(one) == round(1100 / 8)
    assert one[:128] == other[:128]
    assert one[128:] != other[128 : len(one)]
    assert 7 not in one + other
    assert prompts.prompt(1, TraceRow(0, 1600, 100, (1, 2, 4, 5))) == other
    assert Prompts(100, {7}, 512, Scale(0.125, 0.1, 4096, 64), seed=2).prompt(0, TraceRow(0, 1100, 9, (1,))) != one


def test_lengths_fit_the_model() -> None:
    prompts = Prompts(100, (), 512, Scale(1.0, 1.0, 256, 40), seed=1)
    row = TraceRow(0, 120_000, 900, tuple(range(235)))
    prompt, output = prompts.lengths(row)
    assert (prompt, output) == (256 - 40 - 1, 40)
    assert len(prompts.prompt(0, row)) == prompt
    assert len(prompts.prompt(3, TraceRow(0, 30, 5))) == 30
    with pytest.raises(ValueError, match="positive"):
        Prompts(100, (), 512, Scale(0.0, 1.0, 256, 40), seed=1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"speed": 0.0}, "--speed"),
        ({"speed": math.nan}, "--speed nan"),
        ({"scale": math.inf}, "--scale inf"),
        ({"scale": 1e300}, "--scale 1e\\+300"),
        ({"output_scale": math.nan}, "--output-scale nan"),
        ({"timeout_s": math.inf}, "--timeout inf"),
        ({"timeout_s": 1e300}, "--timeout 1e\\+300"),
        ({"trace": Path("none")}, "none"),
    ],
)
def test_wrong_flags_are_one_line(change: dict[str, object], says: str, tmp_path: Path) -> None:
    write_trace(generate(Shape(requests=3), 1), tmp_path / "trace.jsonl")
    options = ReplayOptions(**{"trace": tmp_path / "trace.jsonl", **change})  # type: ignore[arg-type]
    with pytest.raises(CliError, match=says) as raised:
        replay("127.0.0.1:1", options)
    assert raised.value.code is Exit.USAGE


def test_a_trace_that_would_take_for_ever_is_refused(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 512, 4, (1,)), TraceRow(1e6, 512, 4, (2,))]
    write_trace(Trace(TraceFormat.MOONCAKE, rows), tmp_path / "trace.jsonl")
    with pytest.raises(CliError, match=r"--speed 1e-06: the trace would take 1e\+12 s"):
        replay("127.0.0.1:1", ReplayOptions(tmp_path / "trace.jsonl", speed=1e-6))


def test_a_large_scale_makes_no_more_than_the_model_takes() -> None:
    prompts = Prompts(100, (), 512, Scale(1e6, 1e6, 256, 40), seed=1)
    assert len(prompts.prompt(0, TraceRow(0, 1 << 40, 1 << 40, (1, 2)))) == 256 - 40 - 1


def test_a_trace_reaches_a_real_cluster_and_shares_prefixes(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every request is answered, and what the trace shares is found cached (L27 tells it)."""
    shape = Shape(requests=12, span_s=12.0, median_blocks=4, longest_blocks=8, documents=0.6, chats=0.4, aborted=0.1)
    trace = generate(shape, seed=5, format_=TraceFormat.MOONCAKE)
    write_trace(trace, tmp_path / "trace.jsonl")
    dropped = sum(row.output_tokens == 0 for row in trace.rows)
    with LocalCluster(ClusterSpec(tiny, {"prefill": 1, "decode": 1})) as cluster:
        options = ReplayOptions(
            tmp_path / "trace.jsonl", speed=100.0, scale=0.25, output_scale=0.01, concurrency=2, as_json=True
        )
        assert replay(cluster.router, options) == Exit.DONE
        told = json.loads(capsys.readouterr().out)
    assert told["requests"] == told["finished"] == 12 - dropped
    assert told["errors"] == {}
    assert told["ttft_s"]["p99"] >= told["ttft_s"]["p50"] > 0
    assert told["prompt_tokens"] > told["cached_tokens"] > 0
    assert told["completion_tokens"] >= told["finished"]
