"""bench.tenants: its statistics against a plain twin, and two rounds of it on real processes (L25)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench._report import JsonValue
from bench.tenants import (
    STORE_SETS,
    Pictures,
    Probes,
    StoreProbes,
    auc,
    make_report,
    probe,
    probe_store,
    send_pictures,
    two_tenants,
)
from headrace.cli.model import make

TIMES = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=12)


@given(TIMES, TIMES)
def test_auc_counts_pairs(sooner: list[float], later: list[float]) -> None:
    """The plain twin: every pair looked at."""
    wins = sum((a < b) + (a == b) / 2 for a in sooner for b in later)
    assert auc(sooner, later) == pytest.approx(wins / (len(sooner) * len(later)))


def test_what_is_shared_fails_the_report() -> None:
    """Times that tell nothing are not enough: one shared key, token or embedding fails it, as do invisible hits."""

    def report(**changes: int) -> dict[str, JsonValue]:
        probes = Probes([9.0, 8.0], [8.0, 9.0], [8.0, 9.0], [1.0, 2.0], same_reused=4)
        stored, pictures = StoreProbes(1, same_loaded=4), Pictures(sent=1)
        for name, value in changes.items():
            setattr(next(one for one in (probes, stored, pictures) if hasattr(one, name)), name, value)
        return make_report(probes, stored, pictures, 600).results

    assert report()["separate"] is True
    assert report()["hits_visible"] is True
    for broken in ({"cross_reused": 128}, {"shared_keys": 1}, {"cross_loaded": 128}, {"shared": 1}):
        assert report(**broken)["separate"] is False
    assert report(same_reused=0)["hits_visible"] is False
    assert report(same_loaded=0)["hits_visible"] is False
    faster = Probes([9.0] * 9, [1.0] * 9, [9.0] * 9, [1.0] * 9, same_reused=4)
    assert make_report(faster, StoreProbes(), Pictures(), 600).results["separate"] is False


def test_two_rounds_share_nothing(tmp_path: Path) -> None:
    """L25 on real processes: tokens, keys and embeddings; no clock."""
    sets = ("load.dtype=float32", "load.block_tokens=32", "load.native_kernels=false", *STORE_SETS)
    model = make("deepseek-v41-tiny", tmp_path, 0)
    with two_tenants(model, {"encoder": 1, "prefill": 1, "decode": 1}, sets, str(tmp_path / "store")) as tenants:
        found = probe(tenants, rounds=2, tokens=150, seed=3)
        stored = probe_store(tenants, rounds=1, tokens=150, seed=3)
        pictures = send_pictures(tenants, 2, seed=3)
    assert (found.cross_reused, found.shared_keys, found.in_flight) == (0, 0, 1)
    assert found.same_reused > 0
    assert (stored.rounds, stored.cross_loaded) == (1, 0)
    assert stored.same_loaded > 0
    assert (pictures.sent, pictures.shared, pictures.repeated) == (2, 0, 0)
