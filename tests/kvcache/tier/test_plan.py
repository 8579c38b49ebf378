"""Which prefix is fetched, against a twin that tries every length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.layout import KVLayout, v3_layout, v41_layout
from headrace.kvcache.tier.plan import FetchPlan, Wanted, pays, plan_fetch

BLOCK = 16
V3 = v3_layout(num_layers=1, kv_lora_rank=8, qk_rope_head_dim=8, kv_dtype="float32", block_tokens=BLOCK)
V41 = v41_layout(
    n_layers=2,
    n_draft_layers=0,
    compress_ratios=(2, 1),
    kv_source_layers=(0, 1),
    head_dim=32,
    index_head_dim=32,
    window=4,
    backtracking=2,
    block_tokens=BLOCK,
    entry_format="float32",
)


def usable(layout: KVLayout, present: set[int], snapshots: set[int], most: int) -> int:
    """L4: the largest whole prefix."""
    return max(
        (
            count * BLOCK
            for count in range(1, most + 1)
            if set(range(count)) <= present and (not layout.has_snapshots or count * BLOCK in snapshots)
        ),
        default=0,
    )


@given(
    layout=st.sampled_from([V3, V41]),
    count=st.integers(0, 9),
    present=st.sets(st.integers(0, 8)),
    found=st.sets(st.integers(0, 8)),
    at_pool=st.sets(st.integers(1, 9)),
    at_sources=st.sets(st.integers(1, 9)),
    room=st.integers(0, 9),
    reached=st.none() | st.integers(0, 9),
)
def test_the_plan_is_the_longest_whole_prefix(
    layout: KVLayout,
    count: int,
    present: set[int],
    found: set[int],
    at_pool: set[int],
    at_sources: set[int],
    room: int,
    reached: int | None,
) -> None:
    """L4: no prefix that could be whole is longer, and the plan names exactly what is missing of it."""
    blocks = range(count)
    has_snapshots = layout.has_snapshots
    in_pool = {index * BLOCK for index in at_pool if index <= count} if has_snapshots else set()
    elsewhere = {index * BLOCK for index in at_sources if index <= count} if has_snapshots else set()
    here = {index for index in present if index < count}
    now = usable(layout, here, in_pool, count)
    keys = tuple(bytes([index]) * 32 for index in blocks)
    wanted = Wanted(keys, tuple(index in here for index in blocks), tuple(sorted(in_pool)), now, room)
    plan = plan_fetch(wanted, layout, found, elsewhere, reached)
    candidates = [FetchPlan(now)]
    for length in range(1, min(count, count if reached is None else reached) + 1):
        missing = tuple(index for index in range(length) if index not in here)
        end = length * BLOCK
        if not set(missing) <= found or len(missing) > room or end <= now:
            continue
        if not has_snapshots or end in in_pool:
            candidates.append(FetchPlan(end, missing))
        elif end in elsewhere:
            candidates.append(FetchPlan(end, missing, end))
    assert plan == max(candidates, key=lambda each: each.tokens)


def test_break_even() -> None:
    """Fetch if it is quicker than computing, not below the least; what is not measured is tried."""
    plan = FetchPlan(1024, (0,))
    assert pays(plan, 0, 1.0, 0.001, 256)
    assert not pays(plan, 0, 1.1, 0.001, 256)
    assert not pays(plan, 800, 0.0, 1.0, 256)
    assert pays(plan, 768, None, 0.001, 256)
    assert pays(plan, 768, 9.0, None, 256)
    assert not pays(FetchPlan(512), 512, None, None, 0)
