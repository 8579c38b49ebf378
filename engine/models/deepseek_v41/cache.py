"""Typed views of a pool's rows and slots: what bytes of spec §17 mean to this model.

Writers take every row of a step. Rows that write nothing (an open group, a ring place that the same chunk overwrites)
are pointed at the reserved row 0 or slot 0, so shapes never depend on values (L5, and graph capture).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.engine.loading import ModelError
from headrace.kernels.modes import NumericMode
from headrace.kernels.ops import Operators
from headrace.kvcache.layout import KVLayout, SourceSection
from headrace.kvcache.pool import KVPool


def check_formats(layout: KVLayout, mode: NumericMode) -> None:
    """Raises ModelError where the entries cannot hold what the mode computes."""
    if layout.entry_format == "native" and not mode.quantises_kv:
        raise ModelError("numeric mode noquant needs entry_format float32: native entries are quantised (spec §17.1)")


@dataclass(frozen=True)
class EntryCodec:
    """How one kind of entry is stored. ``store`` gives the stored form and the values that readers will see."""

    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]

    def store(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stored = self.encode(values)
        return stored, self.decode(stored, values.dtype)


def _widened(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return stored.to(dtype)


@dataclass(frozen=True)
class Codecs:
    """Codecs of a layout's three entry kinds."""

    swa: EntryCodec
    main: EntryCodec
    index: EntryCodec


def make_codecs(layout: KVLayout, mode: NumericMode, ops: Operators) -> Codecs:
    """native entries are the bytes of §17.1; float32 entries hold the same values unpacked (noquant: unrounded)."""
    if layout.entry_format == "native":
        return Codecs(
            swa=EntryCodec(ops.encode_swa, ops.decode_swa),
            main=EntryCodec(ops.encode_main, ops.decode_main),
            index=EntryCodec(ops.encode_index, ops.decode_index),
        )
    if not mode.quantises_kv:
        plain = EntryCodec(torch.Tensor.float, _widened)
        return Codecs(plain, plain, plain)
    return Codecs(
        swa=EntryCodec(lambda x: ops.round_trip_e4m3(x).float(), _widened),
        main=EntryCodec(lambda x: ops.round_trip_fp4_main(x).float(), _widened),
        index=EntryCodec(lambda x: ops.round_trip_fp4_index(x).float(), _widened),
    )


@dataclass(frozen=True)
class Ring:
    """One layer's sliding window; position p lies at place p mod ρ of its slot."""

    entries: torch.Tensor
    """[slots, ρ, bytes] uint8 or [slots, ρ, D] float32, a view of the pool."""
    codec: EntryCodec

    def read(self, slots: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``slots [B], positions [B, n] → [B, n, D]``. Positions not in the ring give other, finite, values."""
        return self.codec.decode(self.entries[slots.unsqueeze(1), positions % self.entries.shape[1]], dtype)

    def write(self, slots: torch.Tensor, positions: torch.Tensor, stored: torch.Tensor) -> None:
        """``slots, positions [n]``, stored [n, …]."""
        self.entries[slots, positions % self.entries.shape[1]] = stored


@dataclass(frozen=True)
class CompressionState:
    """Gates and values of a source's last positions: place p mod S of float32 [slots, S, 2, D], gate first."""

    entries: torch.Tensor

    def read(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``slots [n], positions [n, r] → [n, r, 2, D]``."""
        return self.entries[slots.unsqueeze(1), positions % self.entries.shape[1]]

    def write(self, slots: torch.Tensor, positions: torch.Tensor, gates_values: torch.Tensor) -> None:
        """``slots, positions [n]``, gates_values [n, 2, D]."""
        self.entries[slots, positions % self.entries.shape[1]] = gates_values


@dataclass(frozen=True)
class Source:
    """One kv source's compressed entries and index keys in the pool's rows."""

    section: SourceSection
    main: torch.Tensor
    """[rows, entries, bytes or D]."""
    index_data: torch.Tensor
    """[rows, entries, I/2] uint8, or [rows, entries, I] float32."""
    index_scales: torch.Tensor | None
    """[rows, entries, I/32] uint8; None for float32 entries."""
    codecs: Codecs

    def write(self, rows: torch.Tensor, places: torch.Tensor, latents: torch.Tensor, keys: torch.Tensor) -> None:
        """Encode and write entries: ``rows, places [n]``, rotated ``latents [n, D]``, ``keys [n, I]``."""
        self.main[rows, places] = self.codecs.main.encode(latents)
        stored = self.codecs.index.encode(keys)
        if self.index_scales is None:
            self.index_data[rows, places] = stored
        else:
            data = self.index_data.shape[-1]
            self.index_data[rows, places] = stored[..., :data]
            self.index_scales[rows, places] = stored[..., data:]

    def read_main(self, rows: torch.Tensor, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``rows, places [...] → [..., D]``."""
        return self.codecs.main.decode(self.main[rows, places], dtype)

    def read_keys(self, tables: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Index keys of whole blocks: ``tables [G, blocks] → [G, blocks · entries, I]``."""
        stored = self.index_data[tables]
        if self.index_scales is not None:
            stored = torch.cat((stored, self.index_scales[tables]), dim=-1)
        return self.codecs.index.decode(stored.flatten(1, 2), dtype)


class CacheViews:
    """Views over one pool for one model."""

    def __init__(self, pool: KVPool, codecs: Codecs) -> None:
        layout = pool.layout
        entry = layout.entry_bytes
        if entry is None:
            raise ModelError(f"the pool's layout is of family {layout.family}, not deepseek_v41")
        plain = layout.entry_format == "float32"

        def view(base: torch.Tensor, offset: int, count: int, size: int) -> torch.Tensor:
            section = base[:, offset : offset + count * size]
            typed = section.view(torch.float32) if plain else section
            return torch.unflatten(typed, 1, (count, -1))

        self.rings = tuple(
            Ring(view(pool.slots, ring.offset, layout.ring_tokens, entry.swa), codecs.swa) for ring in layout.rings
        )
        self.sources = {
            s.layer: Source(
                section=s,
                main=view(pool.rows, s.main_offset, s.entries, entry.main),
                index_data=view(pool.rows, s.index_offset, s.entries, entry.index_data),
                index_scales=None if plain else view(pool.rows, s.index_scale_offset, s.entries, entry.index_scale),
                codecs=codecs,
            )
            for s in layout.sources
        }
        self.states = {
            c.layer: CompressionState(
                torch.unflatten(pool.slots[:, c.offset : c.offset + c.bytes].view(torch.float32), 1, (c.tokens, 2, -1))
            )
            for c in layout.compression
        }
