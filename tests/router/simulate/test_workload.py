"""K copies of a trace, against a plain walk through them."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.router.cost.curves import DecodeCurve
from headrace.router.simulate.generated import Shape, generate
from headrace.router.simulate.models import PublishedPrefill
from headrace.router.simulate.offline import Unit, at_load, bound
from headrace.router.simulate.workload import (
    ARRIVALS_AT_A_TIME,
    BlockKeys,
    Superposition,
    TraceColumns,
    WorkloadError,
    columns,
    sessions,
    walk,
)

UNIT = Unit(8, 8, PublishedPrefill(), DecodeCurve())


def blocks_of(trace: TraceColumns, row: int) -> list[int]:
    return trace.ids[trace.starts[row] : trace.starts[row + 1]].tolist()


def test_rows_without_output_are_dropped_and_counted() -> None:
    made = generate(Shape(requests=200, aborted=0.3), seed=1)
    trace = columns(made)
    assert trace.dropped == sum(row.output_tokens == 0 for row in made.rows) > 0
    assert len(trace) + trace.dropped == 200
    with pytest.raises(WorkloadError):
        columns(generate(Shape(requests=20, aborted=1.0), seed=1))


def test_only_full_blocks_count(trace: TraceColumns) -> None:
    assert (np.diff(trace.starts) == trace.prompt // 512).all()


@pytest.mark.parametrize("copies", [1, 2.4, 3])
def test_hits_are_those_of_one_infinite_cache(trace: TraceColumns, copies: float) -> None:
    """A plain twin: walk through the requests with one set."""
    workload = Superposition(trace, seed=5, duration_s=120.0).workload(copies)
    held: set[tuple[int, int]] = set()
    for row, copy, hit in zip(workload.row.tolist(), workload.copy.tolist(), workload.hit_blocks.tolist(), strict=True):
        names = [(copy, block) for block in blocks_of(trace, row)]
        leading = next((i for i, name in enumerate(names) if name not in held), len(names))
        assert hit == leading
        held.update(names)


def test_loads_are_nested_and_seeded(trace: TraceColumns) -> None:
    one, same, other = (Superposition(trace, seed, 120.0) for seed in (1, 1, 2))
    few, many = one.workload(2.5), one.workload(4)
    assert set(zip(few.copy.tolist(), few.at.tolist(), strict=True)) <= set(
        zip(many.copy.tolist(), many.at.tolist(), strict=True)
    )
    assert (same.workload(4).at == many.at).all()
    assert len(other.workload(4).at) != len(many.at) or (other.workload(4).at != many.at).any()
    assert (np.diff(many.at) >= 0).all()
    assert many.at[0] >= 0
    assert many.at[-1] < 120.0


def test_a_part_of_a_copy_keeps_whole_sessions(trace: TraceColumns) -> None:
    groups = sessions(trace)
    workload = Superposition(trace, 7, trace.period_s).workload(0.4)
    kept = set(groups[workload.row].tolist())
    assert {int(group) for row, group in enumerate(groups) if int(group) in kept} == kept
    assert len(workload) == sum(int(group) in kept for group in groups.tolist())
    assert 0.3 < len(workload) / len(trace) <= 0.4


def test_sessions_share_more_than_a_system_prompt(trace: TraceColumns) -> None:
    groups = sessions(trace)
    system = blocks_of(trace, 0)[0]
    for group in set(groups.tolist()):
        rows = np.flatnonzero(groups == group).tolist()
        common = set.intersection(*(set(blocks_of(trace, row)) for row in rows)) - {system}
        assert len(rows) == 1 or common


def test_time_is_never_compressed(trace: TraceColumns) -> None:
    with pytest.raises(WorkloadError, match="do not fit"):
        Superposition(trace, 1, trace.period_s + 1.0)
    with pytest.raises(WorkloadError, match="no load"):
        Superposition(trace, 1, 60.0).workload(0)


def test_keys_are_fresh_in_every_copy_and_equal_for_equal_blocks(trace: TraceColumns) -> None:
    keys = BlockKeys(trace)
    rows = np.arange(len(trace))
    by_block: dict[int, bytes] = {}
    for row, prompt in zip(rows.tolist(), keys.of(rows, np.zeros_like(rows)), strict=True):
        for block, key in zip(blocks_of(trace, row), prompt, strict=True):
            assert by_block.setdefault(block, key) == key
            assert len(key) == 32
    assert len(set(by_block.values())) == len(by_block)
    assert not set(by_block.values()) & {key for prompt in keys.of(rows, np.ones_like(rows)) for key in prompt}


def test_arrivals_are_the_workload_however_many_at_a_time(trace: TraceColumns) -> None:
    workload = Superposition(trace, 2, 100.0).workload(12)
    assert len(workload) > ARRIVALS_AT_A_TIME
    keys = BlockKeys(trace).of(workload.row, workload.copy)
    told = list(walk(workload, keyed=True))
    assert [arrival.keys for arrival in told] == keys
    assert [arrival.at for arrival in told] == workload.at.tolist()
    assert [arrival.output_tokens for arrival in told] == trace.output[workload.row].tolist()
    assert not any(arrival.keys for arrival in walk(workload, keyed=False))


def test_the_bound_is_the_sum_that_the_spec_writes(trace: TraceColumns) -> None:
    """spec/balancers.md: T_P = batch time ÷ ranks with mean terms, T_D = output · 50 ms ÷ (ranks · n*)."""
    workload = Superposition(trace, 2, 100.0).workload(6)
    prompt, output = trace.prompt[workload.row], trace.output[workload.row]
    hit = np.minimum(workload.hit_blocks, (prompt - 1) // 512) * 512
    found = bound(workload, UNIT)
    batches = (prompt - hit).sum() / 32_768
    mean_b, mean_h = len(workload) / batches, hit.sum() / batches
    ms = PublishedPrefill().curve.seconds(mean_b, 32_768, mean_h, (hit > 0).mean(), (hit / prompt).mean()) * 1000
    assert found.prefill_s == pytest.approx(batches * ms / 1000 / 8)
    kv = (output * (prompt + output / 2)).sum() / output.sum()
    running = (50 - 25) / (0.08 + 2.0e-6 * kv)
    assert found.balanced_requests == pytest.approx(running, rel=1e-4)
    assert found.decode_s == pytest.approx(output.sum() * 0.050 / (8 * running), rel=1e-4)
    assert found.rate == pytest.approx(len(workload) / max(found.prefill_s, found.decode_s))


@pytest.mark.parametrize("load", [0.3, 0.9])
def test_a_load_is_exact_for_every_seed(trace: TraceColumns, load: float) -> None:
    for seed in (1, 2):
        copies = Superposition(trace, seed, 120.0)
        workload = at_load(copies, UNIT, load, 40.0, 110.0)
        assert bound(workload.between(40.0, 110.0), UNIT).seconds / 70.0 == pytest.approx(load, rel=0.01)
