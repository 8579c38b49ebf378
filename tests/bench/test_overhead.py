"""bench/overhead.py: its arithmetic, and one whole run on a random tiny model in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.overhead import Shape, measure
from bench.overhead_harness.handed_over import rate
from bench.overhead_harness.load import Trace, figures
from headrace.engine.loading import ModelSettings
from headrace.v1 import common_pb2, decode_pb2
from tests.services import tiny


def trace(sent: float, ended: float, tokens: int) -> Trace:
    """Tokens at even distances, the last at the end."""
    step = (ended - sent) / tokens
    return Trace(sent, [(sent + step * (index + 1), 1) for index in range(tokens)], ended)


def test_the_steady_window_of_one_client() -> None:
    """Three answers of 4 tokens, one second each: the window is the second one."""
    found = figures([trace(float(start), start + 1.0, 4) for start in range(3)], 1)
    assert found.window_s == pytest.approx(1.0)
    assert found.tokens_per_s == pytest.approx(4.0)
    assert found.requests_per_s == pytest.approx(1.0)
    assert found.ttft_p50_ms == pytest.approx(250.0)
    assert found.per_token_p50_ms == pytest.approx(250.0)


def test_ramps_do_not_count() -> None:
    """Two clients: what is before the second end and after the last start is left out."""
    traces = [trace(0, 2, 2), trace(0, 3, 2), trace(2, 5, 2), trace(3, 6, 2), trace(5, 99, 2)]
    found = figures(traces, 2)
    assert found.window_s == pytest.approx(2.0)  # from 3, the second end, to 5, the last start
    assert found.tokens_per_s == pytest.approx(3 / 2)
    early = figures(traces, 2, fill=1)
    assert early.window_s == pytest.approx(3.0)  # a single stage: from the first end
    with pytest.raises(ValueError, match="steady state"):
        figures(traces[:4], 2)


def events(*counts: int, finished: bool = False) -> list[decode_pb2.RequestEvents]:
    return [
        decode_pb2.RequestEvents(
            tokens=[common_pb2.TokensEvent(token_ids=range(count))] if count else [],
            finished=[common_pb2.FinishedEvent()] if finished else [],
        )
        for count in counts
    ]


def test_decode_alone_counts_from_the_first_full_step_to_the_first_end() -> None:
    arrivals = [(0.0, events(1)), (1.0, events(1, 1)), (2.0, events(1, 1)), (4.0, events(1, 1, finished=True))]
    assert rate(arrivals, 2) == (pytest.approx(4 / 3), pytest.approx(2 / 3))
    with pytest.raises(RuntimeError, match="never ran together"):
        rate(arrivals[:1], 2)


def test_a_small_run(tmp_path: Path) -> None:
    """Every part runs in real processes; the object has the fields that the issue names."""
    folder = tiny.make_v3(tmp_path / "model")
    shape = Shape(prompt_tokens=40, answer_tokens=6, concurrency=2, requests_c1=3, requests_c8=6, requests_prefill=5)
    load = ModelSettings(block_tokens=tiny.BLOCK, native_kernels=False)
    sets = (f"load.block_tokens={tiny.BLOCK}", "load.native_kernels=false", "engine.kv_bytes=16777216")
    report = json.loads(measure(folder, shape, 1, {"router": frozenset()}, threads=1, sets=sets, load=load).to_json())
    assert 0 < report["pipeline_efficiency_c8"] < 10
    assert report["tokens_per_s_c8"] > 0
    assert report["ratio_to_offline_c8"] > 0
    assert report["cached_tokens"] == 0
    assert set(report["cpu"]) == {"cluster_c1", "cluster_c2", "prefill_c2", "idle"}
    assert set(report["cpu"]["cluster_c2"]) == {"router-0", "prefill-0", "decode-0", "client"}
    assert {row["part"] for row in report["rows"]} == {
        "offline_c1", "offline_c8", "cluster_c1", "cluster_c8", "prefill_c8"
    }  # fmt: skip
    assert report["decode_rounds"][0]["sequences"] == 2
