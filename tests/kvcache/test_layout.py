"""Layout of both families against the figures that DeepInfer's own layout code gave (golden kv_layout.json)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.kvcache.layout import EntryBytes, KVLayout, LayoutError, v3_layout, v41_layout

FULL: dict[str, Any] = {
    "n_layers": 40,
    "n_draft_layers": 3,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layers": [2, 8, 14, 20],
    "head_dim": 512,
    "index_head_dim": 128,
    "window": 128,
}
TINY: dict[str, Any] = {
    "n_layers": 8,
    "n_draft_layers": 1,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0],
    "kv_source_layers": [2, 4, 5],
    "head_dim": 64,
    "index_head_dim": 64,
    "window": 16,
}
# The numbers of shared/golden/v41/kv_layout.json.
GOLDEN: dict[str, dict[str, Any]] = {
    "full": {
        "kv_sections": [(2, 0, 22784), (8, 22784, 22784), (14, 45568, 22784), (20, 68352, 45568)],
        "block_bytes": 114048,
        "entry_bytes": (288, 528, 68),
        "ring_tokens": 134,
        "swa_layer_bytes": 70752,
        "swa_layer_bytes_padded": 70752,
        "stored_swa_layers": 20,
        "dropped_swa_layers": 23,
        "compress_state_tokens": 7,
        "compress_state_bytes": 86016,
        "state_to_disk_bytes": 1415040,
        "state_slot_bytes": 3128928,
    },
    "tiny": {
        "kv_sections": [(2, 0, 4480), (4, 4480, 4480), (5, 8960, 8960)],
        "block_bytes": 18432,
        "entry_bytes": (36, 66, 34),
        "ring_tokens": 22,
        "swa_layer_bytes": 1452,
        "swa_layer_bytes_padded": 1472,
        "stored_swa_layers": 5,
        "dropped_swa_layers": 4,
        "compress_state_tokens": 7,
        "compress_state_bytes": 7168,
        "state_to_disk_bytes": 7360,
        "state_slot_bytes": 21120,
    },
}


@pytest.mark.parametrize(("name", "config"), [("full", FULL), ("tiny", TINY)])
def test_v41_figures_equal_the_golden_ones(name: str, config: dict[str, Any]) -> None:
    layout, golden = v41_layout(**config), GOLDEN[name]
    entry = layout.entry_bytes
    assert entry is not None
    assert [(s.layer, s.index_offset, s.bytes) for s in layout.sources] == golden["kv_sections"]
    assert layout.block_bytes == golden["block_bytes"]
    assert (entry.main, entry.swa, entry.index) == golden["entry_bytes"]
    assert layout.ring_tokens == golden["ring_tokens"]
    assert {ring.bytes for ring in layout.rings} == {golden["swa_layer_bytes"]}
    assert layout.rings[1].offset - layout.rings[0].offset == golden["swa_layer_bytes_padded"]
    assert sum(ring.stored for ring in layout.rings) == golden["stored_swa_layers"]
    assert sum(not ring.stored for ring in layout.rings) == golden["dropped_swa_layers"]
    assert {state.tokens for state in layout.compression} == {golden["compress_state_tokens"]}
    assert sum(state.bytes for state in layout.compression) == golden["compress_state_bytes"]
    assert layout.snapshot_bytes == golden["state_to_disk_bytes"]
    assert layout.slot_bytes == golden["state_slot_bytes"]


def test_v41_sections_inside_a_row() -> None:
    """Spec §17.2: index section 4352 + main 18432 for an r = 2 source, 8704 + 36864 for r = 1."""
    layout = v41_layout(**FULL)
    first, last = layout.source(2), layout.source(20)
    assert (first.entries, first.index_scale_offset, first.main_offset) == (64, 64 * 64, 4352)
    assert (last.entries, last.main_offset - last.index_offset, last.bytes) == (128, 8704, 8704 + 36864)
    assert last.index_offset + last.bytes == 113920


def spans_of(layout: KVLayout) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(row spans, slot spans) as (offset, bytes) in the order they lie."""
    assert layout.entry_bytes is not None
    row = []
    for source in layout.sources:
        row.append((source.index_offset, source.entries * layout.entry_bytes.index_data))
        row.append((source.index_scale_offset, source.entries * layout.entry_bytes.index_scale))
        row.append((source.main_offset, source.entries * layout.entry_bytes.main))
    slot = [(ring.offset, ring.bytes) for ring in layout.rings] + [(s.offset, s.bytes) for s in layout.compression]
    return row, slot


@pytest.mark.parametrize("entry_format", ["native", "float32"])
@pytest.mark.parametrize(
    "config", [FULL, TINY, TINY | {"block_tokens": 32}, TINY | {"head_dim": 96, "index_head_dim": 32}]
)
def test_v41_sections_do_not_overlap_and_are_aligned(config: dict[str, Any], entry_format: str) -> None:
    layout = v41_layout(**config, entry_format=entry_format)  # type: ignore[arg-type]
    for spans, end in zip(spans_of(layout), (layout.block_bytes, layout.slot_bytes), strict=True):
        reached = 0
        for offset, size in spans:
            assert offset >= reached
            reached = offset + size
        assert reached <= end
    assert all(source.main_offset % 32 == 0 and source.index_offset % 32 == 0 for source in layout.sources)
    assert all(part.offset % 32 == 0 for part in (*layout.rings, *layout.compression))
    assert layout.block_bytes % 128 == 0
    stored = [ring for ring in layout.rings if ring.stored]
    assert stored == list(layout.rings[: len(stored)])
    assert layout.rings[len(stored)].offset == layout.snapshot_bytes


def test_v41_float32_entries() -> None:
    layout = v41_layout(**TINY, entry_format="float32")
    assert layout.entry_bytes == EntryBytes(main=256, swa=256, index_data=256, index_scale=0)
    assert [(s.index_offset, s.main_offset) for s in layout.sources] == [(0, 16384), (32768, 49152), (65536, 98304)]
    assert layout.block_bytes == 131072
    assert layout.snapshot_bytes == 5 * 22 * 256


def test_v3_rows() -> None:
    """SmolLM2 as V3: 30 layers · 128 tokens · 448 values · 2 B (spec/protocol.md, Identity)."""
    layout = v3_layout(num_layers=30, kv_lora_rank=256, qk_rope_head_dim=192, kv_dtype="bfloat16")
    assert (layout.block_bytes, layout.snapshot_bytes, layout.slot_bytes) == (3_440_640, 0, 0)
    assert not layout.has_snapshots
    assert [section.offset for section in layout.latents[:2]] == [0, 128 * 448 * 2]
    odd = v3_layout(num_layers=1, kv_lora_rank=3, qk_rope_head_dim=2, kv_dtype="bfloat16", block_tokens=7)
    assert (odd.block_bytes, odd.latents[0].bytes) == (256, 70)


def test_fingerprint_tells_every_field_apart() -> None:
    """L1: whatever shapes the bytes changes the fingerprint; equal numbers give equal fingerprints."""
    base = v41_layout(**TINY)
    variants = [
        v41_layout(**TINY, entry_format="float32"),
        v41_layout(**TINY, block_tokens=32),
        v41_layout(**TINY, backtracking=7),
        v41_layout(**TINY | {"window": 17}),
        v41_layout(**TINY | {"head_dim": 128}),
        v41_layout(**TINY | {"n_draft_layers": 0, "compress_ratios": TINY["compress_ratios"][:-1]}),
        v3_layout(num_layers=30, kv_lora_rank=256, qk_rope_head_dim=192),
        v3_layout(num_layers=30, kv_lora_rank=256, qk_rope_head_dim=192, kv_dtype="float32"),
        v3_layout(num_layers=30, kv_lora_rank=256, qk_rope_head_dim=192, kv_dtype="float16"),
    ]
    prints = {layout.fingerprint for layout in [base, *variants]}
    assert len(prints) == len(variants) + 1
    assert all(len(value) == 32 for value in prints)
    assert v41_layout(**TINY).fingerprint == base.fingerprint


def test_fingerprints_are_pinned() -> None:
    """A change here makes every stored block and every running peer foreign: it must be deliberate."""
    assert v41_layout(**FULL).fingerprint.hex() == "1f24625fab409b230d19b97d4686b29788bb919a1952b6893537924078763df5"
    smollm2 = v3_layout(num_layers=30, kv_lora_rank=256, qk_rope_head_dim=192)
    assert smollm2.fingerprint.hex() == "017a75272cb961e189b637657ee3cf8b71ebbee20faa69199683641e01b9f2e9"


def test_row_fingerprint_ignores_the_ring() -> None:
    """spec/protocol.md: the key root has "layout_fp without ring"."""
    base, wider = v41_layout(**TINY), v41_layout(**TINY, backtracking=9)
    assert base.row_fingerprint == wider.row_fingerprint
    assert base.row_fingerprint != v41_layout(**TINY, entry_format="float32").row_fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"n_layers": 0},
        {"n_draft_layers": -1},
        {"compress_ratios": [0, 0, 2]},
        {"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1]},
        {"compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1, 0]},
        {"compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 0]},
        {"compress_ratios": [0, 0, -2, -2, -2, 1, 1, 1, 0]},
        {"kv_source_layers": []},
        {"kv_source_layers": [4, 2, 5]},
        {"kv_source_layers": [2, 4, 5, 8]},
        {"kv_source_layers": [1, 2, 5]},
        {"head_dim": 48},
        {"index_head_dim": 16},
        {"window": 0},
        {"backtracking": 0},
        {"block_tokens": 0},
        {"block_tokens": 33},
        {"entry_format": "fp8"},
        {"entry_format": "float32", "head_dim": 0},
    ],
)
def test_v41_refuses_impossible_numbers(change: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        v41_layout(**TINY | change)


@pytest.mark.parametrize("change", [{"num_layers": 0}, {"kv_lora_rank": -1}, {"kv_dtype": "int4"}, {"block_tokens": 0}])
def test_v3_refuses_impossible_numbers(change: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        v3_layout(**{"num_layers": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 16} | change)


def test_layout_is_frozen_and_hashable() -> None:
    layout = v41_layout(**TINY)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.block_bytes = 1  # type: ignore[misc]
    assert hash(layout) == hash(v41_layout(**TINY))
