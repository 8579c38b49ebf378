"""bench.store counts whole records on both sides, and judges the median round."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.store import LIMITS, Timings, below
from bench.store_harness.cases import cases
from bench.store_harness.raw import Run, runs_of

ROOT = Path(__file__).parents[2]


def test_a_record_of_114_048_bytes_takes_118_784() -> None:
    [case] = cases(256 << 20, (114_048,))
    assert case.record == 118_784
    assert case.total == case.record * case.count


def test_the_median_round_of_the_best_numbers_of_threads_is_judged() -> None:
    [case] = cases(1 << 20, (114_048,))
    timings = Timings(case)
    for raw, engine in ((1.0, 2.0), (1.0, 1.0), (1.0, 1.25)):
        timings.add("raw read", 1, raw)
        timings.add("raw read", 4, 2 * raw)
        timings.add("read", 1, 3 * engine)
        timings.add("read", 4, engine)
    assert timings.ratios("read", "raw read") == [0.5, 1.0, 0.8]


def test_neighbours_are_joined_up_to_the_size_of_a_call() -> None:
    one, other = Path("one"), Path("other")
    places = [(one, 0), (one, 10), (one, 20), (one, 40), (other, 50)]
    assert runs_of(places, 10, 25) == [Run(one, 0, 2), Run(one, 20, 1), Run(one, 40, 1), Run(other, 50, 1)]


def test_a_ratio_below_its_limit_fails() -> None:
    good = dict(LIMITS)
    assert below(good) == []
    assert below(good | {"write_ratio": 0.84}) == ["write_ratio 0.84 < 0.85"]


def test_a_small_run_prints_every_field(tmp_path: Path) -> None:
    """Figures of so little mean nothing; that all sides do the same work and nothing fails does."""
    arguments = ["--mib", "4", "--rounds", "1", "--threads", "2", "--payloads", "114048", "--index-rows", "2000"]
    arguments += ["--peers"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.store", "--json", "--dir", str(tmp_path), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if "has no O_DIRECT" in done.stderr:
        pytest.skip(f"{tmp_path} has no O_DIRECT")
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    for name in (*LIMITS, "lookups_per_s", "index_bytes_per_block", "file_per_block_write_ratio"):
        assert report[name] > 0
    assert report["passed"] == (done.returncode == 0)
    assert {row["record B"] for row in report["rows"]} == {118_784}
    assert list(tmp_path.iterdir()) == [], "nothing is left on the disk"
