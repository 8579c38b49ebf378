"""The parts of rows and slots: plain numbers that layout.py computes and models make typed views from. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EntryBytes:
    """Bytes of one V4.1 entry. In the native format data bytes stand first, scales behind them."""

    main: int
    """Compressed KV: native D/2 packed e2m1 + D/16 e4m3; float32 4·D."""
    swa: int
    """Sliding window KV: native D e4m3 + D/32 e8m0; float32 4·D."""
    index_data: int
    """Index key: native I/2 packed e2m1; float32 4·I."""
    index_scale: int
    """Index scales: native I/32 e8m0; float32 0."""

    @property
    def index(self) -> int:
        return self.index_data + self.index_scale


@dataclass(frozen=True)
class SourceSection:
    """One kv source's part of a V4.1 row: [index data of all entries][index scales of all entries][main entries].

    The index section is block-wide, so a row is the smallest unit that may be moved; main entries are contiguous each.
    """

    layer: int
    ratio: int
    """r: tokens per entry. Entry j of the source lies in block ⌊j / entries⌋, place j mod entries."""
    entries: int
    """block_tokens / r."""
    index_offset: int
    """Start of the index section and of its data, in bytes from the start of the row."""
    index_scale_offset: int
    """Start of the index scales; in the float32 format there are none and this is the end of the data."""
    main_offset: int
    bytes: int
    """Whole section with its padding."""


@dataclass(frozen=True)
class RingSection:
    """One layer's window in a V4.1 slot: ring_tokens entries of entry_bytes.swa, position p at p mod ring_tokens."""

    layer: int
    """Backbone layer, or n_layers + i for draft layer i."""
    offset: int
    bytes: int
    """ring_tokens · entry_bytes.swa, without the padding that follows."""
    stored: bool
    """True for producer layers: the ring is part of a snapshot."""


@dataclass(frozen=True)
class CompressionSection:
    """Open-group state of one kv source with r > 1: float32 [tokens, 2, D], (gate, value) in the middle axis."""

    layer: int
    ratio: int
    tokens: int
    """r + backtracking − 1."""
    offset: int
    bytes: int


@dataclass(frozen=True)
class LatentSection:
    """One layer's part of a V3 row: [block_tokens, kv_lora_rank + qk_rope_head_dim] in kv_dtype."""

    layer: int
    offset: int
    bytes: int
