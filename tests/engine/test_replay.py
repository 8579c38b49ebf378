"""Bounded replay's numbers, and budgets."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from headrace.engine.replay import default_keep_tokens, end_snapshots, plan_replay
from headrace.engine.settings import EngineSettings
from headrace.engine.sizing import TooLittleMemory, pool_sizes
from headrace.kvcache.layout import KVLayout, v3_layout, v41_layout


def full_size() -> KVLayout:
    """The published V4.1 layout."""
    ratios = [0, 0] + [2] * 18 + [1] * 23 + [0] * 3
    return v41_layout(
        n_layers=43,
        n_draft_layers=3,
        compress_ratios=ratios,
        kv_source_layers=(2, 8, 14, 20),
        head_dim=512,
        index_head_dim=128,
        window=128,
    )


def test_published_numbers(kit: Any) -> None:
    """K is 140 at full size; snapshots at the last three boundaries (spec/kv_tier.md)."""
    layout = full_size()
    assert default_keep_tokens(layout) == 140
    plan = plan_replay(kit.request("r", 1000), layout, EngineSettings())
    assert plan.keep_from == 860
    assert sorted(plan.snapshot_positions) == [640, 768, 896]
    assert plan.decode_snapshots == 3
    assert plan.largest_prefix(1000, 128) == 768
    assert plan.largest_prefix(5000, 128) == 768


def test_long_prompts_have_snapshots_on_the_way(kit: Any) -> None:
    """Every 4,096 tokens, so that a prompt that leaves another early still reuses most of what they share."""
    plan = plan_replay(kit.request("r", 9000, snapshot_at=(1280,)), full_size(), EngineSettings())
    assert sorted(plan.snapshot_positions) == [1280, 4096, 8192, 8704, 8832, 8960]
    plan = plan_replay(kit.request("r", 9000), full_size(), EngineSettings(snapshot_interval=3000))
    assert sorted(plan.snapshot_positions) == [3072, 6144, 8704, 8832, 8960]


@pytest.mark.parametrize(("keep", "count"), [(8, 3), (140, 3), (256, 3), (257, 4), (1000, 9)])
def test_enough_snapshots_for_the_bound(keep: int, count: int) -> None:
    """A longer prompt reuses block · ⌊(m − K)/block⌋ of m common tokens, wherever in a block they end."""
    assert end_snapshots(keep, 128) == count
    for length in range(1, 3000):
        at_end = [boundary * 128 for boundary in range(length // 128, 0, -1)][:count]
        wanted = max(length - keep, 0) // 128 * 128
        assert wanted in at_end or wanted == 0


@pytest.mark.parametrize("length", [1, 139, 140, 141, 268, 269])
def test_short_prompts_run_the_full_model(kit: Any, length: int) -> None:
    """N₀ ≤ K: no bound, no cached prefix; the first usable prefix is one block at N₀ = K + block."""
    plan = plan_replay(kit.request("r", length), full_size(), EngineSettings())
    assert plan.keep_from == max(length - 140, 0)
    assert plan.largest_prefix(length, 128) == (128 if length >= 268 else 0)


def test_off_disables_reuse(kit: Any) -> None:
    """Replay off is the full model without prefix reuse."""
    plan = plan_replay(kit.request("r", 1000, snapshot_at=(128,)), full_size(), EngineSettings(replay="off"))
    assert (plan.keep_from, plan.largest_prefix(1000, 128), plan.snapshot_positions) == (0, 0, frozenset())


def test_v3_reuses_all_but_the_last_token(kit: Any) -> None:
    """Layouts without snapshots: up to len − 1, with the tokens known now."""
    layout = v3_layout(num_layers=1, kv_lora_rank=8, qk_rope_head_dim=8)
    plan = plan_replay(kit.request("r", 256), layout, EngineSettings())
    assert (plan.keep_from, plan.largest_prefix(256, 128), plan.largest_prefix(257, 128)) == (0, 128, 256)


def test_budgets_become_counts() -> None:
    """L29: the pool stays inside its bytes; too small a budget is refused with what it takes."""
    layout = full_size()
    settings = EngineSettings(kv_bytes=1 << 30, max_sequences=16)
    sizes = pool_sizes(layout, settings, 65536)
    assert sizes.bytes(layout) <= settings.kv_bytes
    assert sizes.num_slots == 17
    assert sizes.num_snapshots > 100
    with pytest.raises(TooLittleMemory, match="kv_bytes"):
        pool_sizes(layout, EngineSettings(kv_bytes=1 << 20), 65536)
    small = v3_layout(num_layers=1, kv_lora_rank=8, qk_rope_head_dim=8)
    assert pool_sizes(small, EngineSettings(kv_bytes=1 << 30, max_sequences=4), 1000).num_rows == 4 * 8 + 1


def test_settings_are_checked() -> None:
    """An unknown key of a settings file is an error; decode rows must leave prefill some budget."""
    with pytest.raises(ValidationError, match="no_such"):
        TypeAdapter(EngineSettings).validate_python({"no_such": 1})
    with pytest.raises(ValueError, match="max_batched_tokens"):
        EngineSettings(max_batched_tokens=32, max_sequences=32)
