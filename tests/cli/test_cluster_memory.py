"""L29: the launcher divides the host's memory once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.cluster_memory import BASE_BYTES, CACHE_BUFFER_BYTES, FRACTION, MIB, device_kv, plan_memory
from headrace.cli.cluster_spec import ClusterSpec, role_of
from headrace.cli.exits import CliError
from headrace.services.runtime.memory import MemoryBudget


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(100 * MIB)
    return tmp_path


def budget(available: int) -> MemoryBudget:
    return MemoryBudget(limit_bytes=2 * available, available_bytes=available, source="test")


def test_all_shares_fit_what_is_available(folder: Path) -> None:
    """L29: processes, weights and every byte handed out together stay within the budget's fraction."""
    spec = ClusterSpec(folder, {"prefill": 2, "decode": 2, "encoder": 1})
    plan = plan_memory(spec, budget(8 << 30))
    assert set(plan) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    base = sum(BASE_BYTES[role_of(name)] for name in spec.names) + len(plan) * 100 * MIB
    handed = sum(one.kv_bytes + one.spill_bytes + one.landing_bytes for one in plan.values())
    assert base + handed <= FRACTION * (8 << 30)
    assert handed > 0.6 * (FRACTION * (8 << 30) - base)


def test_a_cache_tier_gets_its_share(folder: Path) -> None:
    """L29: host memory for prefixes comes out of the same budget, buffers of the store included."""
    spec = ClusterSpec(folder, {"prefill": 1, "decode": 1}, store="somewhere")
    plan, without = plan_memory(spec, budget(8 << 30)), plan_memory(replace(spec, store=None), budget(8 << 30))
    base = sum(BASE_BYTES[role_of(name)] for name in spec.names) + len(plan) * (100 * MIB + CACHE_BUFFER_BYTES)
    handed = sum(one.kv_bytes + one.spill_bytes + one.landing_bytes + one.host_bytes for one in plan.values())
    assert base + handed <= FRACTION * (8 << 30)
    assert all(one.host_bytes > 0 for one in plan.values())
    assert all(one.host_bytes == 0 for one in without.values())


def test_an_explicit_budget_replaces_the_measured_one(folder: Path) -> None:
    spec = ClusterSpec(folder, memory_bytes=4 << 30)
    assert plan_memory(spec, budget(1)) == plan_memory(spec, budget(1 << 40))


def test_too_little_is_refused_with_advice(folder: Path) -> None:
    with pytest.raises(CliError, match=r"too little for 3 processes.*--memory"):
        plan_memory(ClusterSpec(folder), budget(1 << 30))


def test_a_cluster_without_engines_needs_no_plan(folder: Path) -> None:
    assert plan_memory(ClusterSpec(folder, {"encoder": 1}), budget(1)) == {}


def test_workers_take_gpus_in_turn(folder: Path) -> None:
    workers = ["prefill-0", "decode-0", "decode-1"]
    plan = device_kv(ClusterSpec(folder), workers, 100 * MIB, {0: 16 << 30, 1: 16 << 30})
    assert plan["prefill-0"] == plan["decode-1"]
    assert plan["decode-0"] > 2 * plan["prefill-0"]
    with pytest.raises(CliError, match="GPU 0 has 1024 MiB free"):
        device_kv(ClusterSpec(folder), workers, 100 * MIB, {0: 1 << 30})
