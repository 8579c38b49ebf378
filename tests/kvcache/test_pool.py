"""Rows, slots and snapshots as bytes: zeroed on allocation, copied, never shared for writing."""

from __future__ import annotations

import pytest
import torch

from headrace.kvcache.pool import KVPool, OutOfRows, OutOfSlots, OutOfSnapshots
from headrace.kvcache.region import NotHeld, PoolError
from tests.kvcache.small_layouts import V3, V41

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")),
]


@pytest.fixture(params=DEVICES)
def pool(request: pytest.FixtureRequest) -> KVPool:
    return KVPool(V41, num_rows=6, num_slots=3, num_snapshots=2, device=request.param)


def test_shapes_follow_the_layout(pool: KVPool) -> None:
    assert pool.rows.shape == (6, V41.block_bytes)
    assert pool.slots.shape == (3, V41.slot_bytes)
    assert pool.snapshots.shape == (2, V41.snapshot_bytes)
    assert all(part.dtype == torch.uint8 and part.is_contiguous() for part in (pool.rows, pool.slots, pool.snapshots))


def test_rows_and_slots_are_zeroed_whenever_they_are_given_out(pool: KVPool) -> None:
    """spec/protocol.md, Exactness: a row's bytes are a function of its prefix and model alone."""
    pool.rows.fill_(255)
    pool.slots.fill_(255)
    rows = pool.allocate_rows(2, "a")
    slot = pool.allocate_slot("a")
    assert pool.rows[list(rows)].count_nonzero() == 0
    assert pool.slots[slot].count_nonzero() == 0
    others = [row for row in range(6) if row not in rows]
    assert (pool.rows[others] == 255).all(), "nothing but the allocated rows is touched"
    assert (pool.slots[0] == 255).all()


def test_reserved_row_and_slot_are_never_given_out(pool: KVPool) -> None:
    assert 0 not in pool.allocate_rows(5, "a")
    assert {pool.allocate_slot("a"), pool.allocate_slot("b")} == {1, 2}


def test_exhaustion_is_typed_and_takes_nothing(pool: KVPool) -> None:
    pool.allocate_rows(3, "a")
    with pytest.raises(OutOfRows) as rows:
        pool.allocate_rows(3, "b")
    assert (rows.value.wanted, rows.value.available, rows.value.can_ever_fit) == (3, 2, True)
    with pytest.raises(OutOfRows) as never:
        pool.allocate_rows(6, "b")
    assert not never.value.can_ever_fit
    slot = pool.allocate_slot("a")
    pool.allocate_slot("b")
    with pytest.raises(OutOfSlots):
        pool.allocate_slot("c")
    pool.take_snapshot(slot, "a")
    pool.take_snapshot(slot, "a")
    with pytest.raises(OutOfSnapshots):
        pool.take_snapshot(slot, "a")
    assert pool.row_region.held_by("b") == frozenset()


def test_copy_on_write_of_a_partial_block(pool: KVPool) -> None:
    (first,) = pool.allocate_rows(1, "choice-0")
    pool.rows[first] = 7
    pool.hold_rows((first,), "choice-1")
    assert pool.is_shared(first)
    with pytest.raises(PoolError):
        pool.copy_row(first, first)
    (copy,) = pool.allocate_rows(1, "choice-1")
    pool.copy_row(first, copy)
    pool.release_rows((first,), "choice-1")
    assert (pool.rows[copy] == 7).all()
    assert not pool.is_shared(first)
    assert not pool.is_shared(copy)


def test_a_copy_needs_live_rows(pool: KVPool) -> None:
    (row,) = pool.allocate_rows(1, "a")
    with pytest.raises(PoolError, match="neither held nor cached"):
        pool.copy_row(5 if row != 5 else 4, row)
    with pytest.raises(PoolError, match="exactly one owner"):
        pool.copy_row(row, 0)


def test_keyed_and_pinned_rows_count_as_shared(pool: KVPool) -> None:
    keyed, pinned = pool.allocate_rows(2, "a")
    pool.row_region.set_key(keyed, b"k" * 32, "a")
    pool.row_region.pin((pinned,), "transfer")
    assert pool.is_shared(keyed)
    assert pool.is_shared(pinned)


def test_a_snapshot_is_the_head_of_a_slot(pool: KVPool) -> None:
    slot = pool.allocate_slot("a")
    pool.slots[slot].copy_(torch.arange(V41.slot_bytes, device=pool.device) % 251)
    place = pool.take_snapshot(slot, "a")
    other = pool.allocate_slot("b")
    pool.restore_snapshot(place, other)
    head = V41.snapshot_bytes
    assert torch.equal(pool.slots[other, :head], pool.slots[slot, :head])
    assert pool.slots[other, head:].count_nonzero() == 0
    pool.copy_slot(slot, other)
    assert torch.equal(pool.slots[other], pool.slots[slot])
    pool.release_snapshot(place, "a")
    with pytest.raises(NotHeld):
        pool.release_snapshot(place, "a")


def test_release_owner_drops_everything_of_one_request(pool: KVPool) -> None:
    """L10: every rejection path releases; the pool then reads idle (L11)."""
    pool.allocate_rows(2, "a")
    slot = pool.allocate_slot("a")
    pool.take_snapshot(slot, "a")
    rows = pool.allocate_rows(1, "b")
    assert not pool.integrity().idle
    pool.release_owner("a")
    pool.release_owner("a")
    assert pool.row_region.owners() == {"b"}
    pool.release_rows(rows, "b")
    report = pool.integrity()
    assert report.sound
    assert report.idle
    assert report.problems == ()


def test_integrity_names_the_region(pool: KVPool) -> None:
    pool.slot_region._free.pop()
    assert pool.integrity().problems == ("slots: unit 1 is in states none",)


def test_layouts_without_slots_use_slot_0() -> None:
    pool = KVPool(V3, num_rows=2, num_slots=4, num_snapshots=4)
    assert pool.slots.shape == (0, 0)
    assert pool.allocate_slot("a") == 0 == pool.allocate_slot("b")
    pool.release_slot(0, "a")
    pool.release_slot(0, "a")
    pool.copy_slot(0, 0)
    with pytest.raises(OutOfSnapshots):
        pool.take_snapshot(0, "a")
    assert pool.integrity().idle


def test_sizes_that_leave_nothing_are_refused() -> None:
    with pytest.raises(PoolError, match="num_rows"):
        KVPool(V3, num_rows=1)
    with pytest.raises(PoolError, match="num_slots"):
        KVPool(V41, num_rows=2, num_slots=1)
    with pytest.raises(PoolError, match="pin_memory"):
        KVPool(V3, num_rows=2, device="meta", pin_memory=True)


def test_typed_views_share_memory(pool: KVPool) -> None:
    """What models do: a float32 view of one layer's latents in every row."""
    pool = KVPool(V3, num_rows=3, device=pool.device)
    section = V3.latents[1]
    view = pool.rows[:, section.offset : section.offset + section.bytes].view(torch.float32).unflatten(1, (16, 12))
    view[2, 3, 4] = 1.0
    assert pool.rows[2].count_nonzero() == 2  # 1.0 = 00 00 80 3f
    assert pool.rows[:2].count_nonzero() == 0
