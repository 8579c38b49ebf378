"""Ring resize (spec §20.9): there and back is lossless inside the window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.layout import KVLayout, LayoutError, v41_layout
from headrace.kvcache.ring import resize_ring, resize_slot, ring_view
from tests.kvcache.small_layouts import V3, V41

WINDOW = V41.window


def wider(backtracking: int) -> KVLayout:
    return v41_layout(
        n_layers=4,
        n_draft_layers=1,
        compress_ratios=[0, 2, 1, 1, 0],
        kv_source_layers=[1, 2],
        head_dim=32,
        index_head_dim=32,
        window=WINDOW,
        backtracking=backtracking,
        block_tokens=16,
    )


def ring_at(places: int, end: int) -> torch.Tensor:
    """A ring after positions 0 … end − 1 were written; a never-written place holds −1."""
    ring = torch.full((places, 2), -1)
    for position in range(end):
        ring[position % places] = position
    return ring


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 60))
def test_the_window_lands_where_the_other_ring_expects_it(here: int, there: int, end: int) -> None:
    target = torch.full((there, 2), -1)
    resize_ring(ring_at(here, end), target, end)
    for position in range(end):
        if position >= end - min(here, there):
            assert (target[position % there] == position).all()
    written = {position % there for position in range(max(end - min(here, there), 0), end)}
    assert all((target[place] == -1).all() for place in range(there) if place not in written)


@given(st.integers(1, 80), st.integers(7, 140))
def test_slot_there_and_back_is_lossless_in_the_window(end: int, backtracking: int) -> None:
    wide = wider(backtracking)
    slot = torch.randint(0, 256, (V41.slot_bytes,), dtype=torch.uint8)
    other = torch.zeros(wide.slot_bytes, dtype=torch.uint8)
    back = torch.zeros_like(slot)
    resize_slot(V41, slot, wide, other, end)
    resize_slot(wide, other, V41, back, end)
    for ring in V41.rings:
        for position in range(max(end - V41.ring_tokens, 0), end):
            place = position % V41.ring_tokens
            assert torch.equal(ring_view(V41, back, ring.layer)[place], ring_view(V41, slot, ring.layer)[place])


def test_a_snapshot_converts_its_stored_rings() -> None:
    """A worker with a wider ring gives the canonical form away (spec/kv_tier.md, Identity)."""
    wide = wider(30)
    slot = torch.randint(0, 256, (wide.slot_bytes,), dtype=torch.uint8)
    snapshot = torch.zeros(V41.snapshot_bytes, dtype=torch.uint8)
    resize_slot(wide, slot[: wide.snapshot_bytes], V41, snapshot, 48)
    stored = [ring.layer for ring in V41.rings if ring.stored]
    assert stored == [0, 1]
    for layer in stored:
        place = 47 % V41.ring_tokens
        assert torch.equal(ring_view(V41, snapshot, layer)[place], ring_view(wide, slot, layer)[47 % wide.ring_tokens])


def test_foreign_layouts_are_refused() -> None:
    with pytest.raises(LayoutError):
        resize_slot(V3, torch.zeros(0, dtype=torch.uint8), V41, torch.zeros(V41.slot_bytes, dtype=torch.uint8), 1)
