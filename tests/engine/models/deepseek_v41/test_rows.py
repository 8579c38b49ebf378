"""The row sets of a step against the rules of spec §7, §17.4 and §18.3, position by position."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.golden_harness.scaffold import Chunk, chunk_batch
from headrace.engine.models.deepseek_v41.rows import RowSet, plan_rows
from headrace.kvcache.layout import KVLayout, v41_layout


def layout_with(window: int, backtracking: int) -> KVLayout:
    return v41_layout(
        n_layers=2,
        n_draft_layers=0,
        compress_ratios=(2, 1),
        kv_source_layers=(0, 1),
        head_dim=32,
        index_head_dim=32,
        window=window,
        backtracking=backtracking,
        block_tokens=4,
    )


def seen(rows: RowSet, row: int) -> list[tuple[int, int]]:
    """(sequence, position) of every window key that a row sees, through the index into history and rows."""
    history = rows.history_positions
    ordered = list(dict.fromkeys(rows.sequences.tolist()))
    keys: list[tuple[int, int]] = []
    for index, valid in zip(rows.window_index[row].tolist(), rows.window_valid[row].tolist(), strict=True):
        if not valid:
            continue
        if index < history.numel():
            member, place = divmod(index, history.shape[1])
            keys.append((ordered[member], int(history[member, place])))
        else:
            other = index - history.numel()
            keys.append((int(rows.sequences[other]), int(rows.positions[other])))
    return keys


def check(rows: RowSet, chunks: list[Chunk], kept: list[tuple[int, int]], layout: KVLayout, *, replay: bool) -> None:
    assert list(zip(rows.sequences.tolist(), rows.positions.tolist(), strict=True)) == kept
    last = {b: c.start + c.length - 1 for b, c in enumerate(chunks)}
    for row, (b, p) in enumerate(kept):
        lowest = max(chunks[b].keep_from if replay else 0, 0)
        first = max(p - layout.window + 1, lowest)
        assert seen(rows, row) == [(b, q) for q in range(first, p + 1)]
        writes = p >= lowest and p > last[b] - layout.ring_tokens
        assert int(rows.ring_slots[row]) == (b + 1 if writes else 0)
    grouped = sorted(int(row) for group in rows.groups for row in group.rows.flatten())
    assert grouped == list(range(rows.count))
    for group in rows.groups:
        for line, table in zip(group.rows, group.tables, strict=True):
            b = int(rows.sequences[line[0]])
            needed = layout.blocks_for(int(rows.positions[line[-1]]) + 1)
            assert set(rows.sequences[line].tolist()) == {b}
            assert table[:needed].tolist() == chunk_batch(layout, chunks).block_tables[b, :needed].tolist()


CHUNKS = st.builds(Chunk, st.integers(0, 30), st.integers(1, 9), st.integers(-2, 40))


@settings(max_examples=60, deadline=None)
@given(
    chunks=st.lists(CHUNKS, min_size=1, max_size=4),
    window=st.integers(1, 6),
    backtracking=st.integers(1, 3),
    mask=st.booleans(),
)
def test_row_sets_against_the_rules(chunks: list[Chunk], window: int, backtracking: int, mask: bool) -> None:
    """Producers run every row with the plain window; consumers run p ≥ keep_from with keys from keep_from on."""
    layout = layout_with(window, backtracking)
    step = plan_rows(replace(chunk_batch(layout, chunks), mask_replay=mask), layout)
    every = [(b, p) for b, c in enumerate(chunks) for p in range(c.start, c.start + c.length)]
    check(step.all, chunks, every, layout, replay=False)
    kept = every if mask else [(b, p) for b, p in every if p >= chunks[b].keep_from]
    check(step.kept, chunks, kept, layout, replay=True)


@settings(max_examples=30, deadline=None)
@given(starts=st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_decode_tensors_come_from_the_batch(starts: list[int]) -> None:
    """A step of single rows takes no host number into a tensor: what a captured graph replays follows the buffers."""
    layout = layout_with(4, 2)
    later = chunk_batch(layout, [Chunk(start + 3, 1) for start in starts])
    replayed, fresh = plan_rows(replace(later, starts=tuple(starts)), layout), plan_rows(later, layout)
    for name in ("positions", "history_positions", "window_index", "window_valid", "ring_slots"):
        assert torch.equal(getattr(replayed.all, name), getattr(fresh.all, name)), name
    assert torch.equal(replayed.chunk.starts, fresh.chunk.starts)
    assert replayed.kept is replayed.all
