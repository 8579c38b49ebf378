"""Dead lanes: found exactly, never a live one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.native.lanes import find_lanes


def covered(runs: list[tuple[int, int]]) -> set[int]:
    return {lane for first, count in runs for lane in range(first, first + count)}


def test_a_dense_layer_has_no_dead_lane() -> None:
    """One run of everything, so that nothing is lost and nothing is paid."""
    lanes = find_lanes(torch.ones(2 * 24, 8), torch.ones(2 * 12, 32), heads=2, nope=8, rope=16, v=4, interleaved=True)
    assert lanes.q_rows == [(0, 48)]
    assert lanes.score == [[(0, 32), (32, 16)]] * 2
    assert lanes.value == [[(0, 32)]] * 2
    assert lanes.entry == [(0, 32), (32, 16)]
    assert lanes.nope_live == [True, True]


def test_grouped_heads_see_their_group_only() -> None:
    """Two KV heads of 32 written as MLA: each query head keeps its half of the latent and its two halves of the key."""
    q = torch.zeros(2, 32 + 64, 8)
    kv_b = torch.zeros(2, 32 + 32, 64)
    for head in range(2):
        q[head, 32 + 16 * head : 48 + 16 * head] = 1
        q[head, 64 + 16 * head : 80 + 16 * head] = 1
        kv_b[head, 32:, 32 * head : 32 * head + 32] = torch.eye(32)
    lanes = find_lanes(q.flatten(0, 1), kv_b.flatten(0, 1), heads=2, nope=32, rope=64, v=32, interleaved=False)
    assert lanes.nope_live == [False, False]
    assert lanes.q_rows == [(32, 16), (64, 16), (144, 16), (176, 16)]
    assert lanes.score == [[(64, 16), (96, 16)], [(80, 16), (112, 16)]]
    assert lanes.value == [[(0, 32)], [(32, 32)]]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), interleaved=st.booleans())
def test_every_live_lane_is_covered(data: st.DataObject, interleaved: bool) -> None:
    """Random zeros in q and kv_b: what can be non-zero is in a run, with the partner it is rotated with."""
    heads, nope, rope, v, rank = (
        2,
        6,
        2 * data.draw(st.sampled_from([5, 16, 24])),
        5,
        data.draw(st.sampled_from([20, 48])),
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    keep = data.draw(st.sampled_from([0.02, 0.1, 0.6]))
    q = torch.randn(heads * (nope + rope), 3, generator=generator)
    q *= (torch.rand(q.shape[0], 1, generator=generator) < keep).float()
    kv_b = torch.randn(heads * (nope + v), rank, generator=generator)
    kv_b *= (torch.rand(kv_b.shape, generator=generator) < keep).float()
    lanes = find_lanes(q, kv_b, heads=heads, nope=nope, rope=rope, v=v, interleaved=interleaved)
    rank16 = -(-rank // 16) * 16
    computed, entry = covered(lanes.q_rows), covered(lanes.entry)
    for head in range(heads):
        live_q = (q.view(heads, nope + rope, 3)[head] != 0).any(-1)
        halves = kv_b.view(heads, nope + v, rank)[head]
        score, value = covered(lanes.score[head]), covered(lanes.value[head])
        for lane in range(rope):
            partner = lane ^ 1 if interleaved else (lane + rope // 2) % rope
            if live_q[nope + lane]:
                assert {rank16 + lane, rank16 + partner} <= score
                assert {head * (nope + rope) + nope + lane, head * (nope + rope) + nope + partner} <= computed
        if live_q[:nope].any() and (halves[:nope] != 0).any():
            assert lanes.nope_live[head]
            assert set(range(head * (nope + rope), head * (nope + rope) + nope)) <= computed
            assert set((halves[:nope] != 0).any(0).nonzero().flatten().tolist()) <= score
        assert set((halves[nope:] != 0).any(0).nonzero().flatten().tolist()) <= value
        assert score | value <= entry
