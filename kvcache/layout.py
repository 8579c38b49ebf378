"""Where every byte of the KV cache lies, computed once from plain numbers of the model config.

Everything that sizes, views, stores or moves KV reads it from here. No torch: the router imports this module.
Source of all offsets: spec/deepseek_v41.md §17 (V4.1) and spec/protocol.md, Identity (V3).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Literal

from headrace.kvcache.sections import CompressionSection, EntryBytes, LatentSection, RingSection, SourceSection

__all__ = [
    "CompressionSection",
    "EntryBytes",
    "EntryFormat",
    "Family",
    "KVDtype",
    "KVLayout",
    "LatentSection",
    "LayoutError",
    "RingSection",
    "SourceSection",
    "v3_layout",
    "v41_layout",
]

Family = Literal["deepseek_v41", "deepseek_v3"]
EntryFormat = Literal["native", "float32"]
KVDtype = Literal["bfloat16", "float16", "float32"]

SECTION_ALIGN = 32
"""Index sections, main sections and rings of V4.1 are padded to this many bytes (spec §17.2, §17.3)."""
V3_ROW_ALIGN = 256
_DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


class LayoutError(ValueError):
    """The numbers describe no layout; the message names the field and the rule."""


@dataclass(frozen=True)
class KVLayout:
    """Sizes and offsets of rows, slots and snapshots. Made by :func:`v41_layout` or :func:`v3_layout` only."""

    family: Family
    entry_format: EntryFormat
    kv_dtype: KVDtype
    """V3: element type of the latents. V4.1: float32 for the float32 format, bfloat16 (the logical type) for native."""
    block_tokens: int
    window: int
    backtracking: int
    """V3: window and backtracking are 0."""
    block_bytes: int
    snapshot_bytes: int
    slot_bytes: int
    head_dim: int = 0
    """D of V4.1."""
    index_head_dim: int = 0
    """I of V4.1."""
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    num_layers: int = 0
    """Backbone layers."""
    num_prefill_layers: int = 0
    """V4.1: producer layers, whose rings are stored; the first consumer layer's index."""
    entry_bytes: EntryBytes | None = None
    sources: tuple[SourceSection, ...] = ()
    rings: tuple[RingSection, ...] = ()
    compression: tuple[CompressionSection, ...] = ()
    latents: tuple[LatentSection, ...] = ()

    @property
    def ring_tokens(self) -> int:
        """ρ, the wire ring: window + backtracking; 0 for V3. A wider local ring is in no layout (ring.py converts)."""
        return self.window + self.backtracking

    @property
    def has_snapshots(self) -> bool:
        """False where every block boundary is a usable prefix end (V3)."""
        return self.snapshot_bytes > 0

    @property
    def latent_width(self) -> int:
        """V3: elements per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def blocks_for(self, tokens: int) -> int:
        """Rows that hold ``tokens`` positions."""
        return -(-tokens // self.block_tokens)

    def source(self, layer: int) -> SourceSection:
        """Section of kv source ``layer``. Raises KeyError for a layer that owns no KV."""
        return self._sources_by_layer[layer]

    def ring(self, layer: int) -> RingSection:
        """Ring of ``layer`` (n_layers + i for draft layer i). Raises KeyError when there is none."""
        return self._rings_by_layer[layer]

    @cached_property
    def _sources_by_layer(self) -> dict[int, SourceSection]:
        return {section.layer: section for section in self.sources}

    @cached_property
    def _rings_by_layer(self) -> dict[int, RingSection]:
        return {section.layer: section for section in self.rings}

    @cached_property
    def _row_identity(self) -> dict[str, object]:
        if self.family == "deepseek_v3":
            formats = {"latent": self.entry_format}
            dtypes: dict[str, str] = {"latent": self.kv_dtype}
        elif self.entry_format == "float32":
            formats = {"main": "float32", "swa": "float32", "index": "float32"}
            dtypes = {"main": "float32", "swa": "float32", "index": "float32", "compression": "float32"}
        else:
            formats = {"main": "native", "swa": "native", "index": "native"}
            dtypes = {"main": "e2m1/e4m3", "swa": "e4m3/e8m0", "index": "e2m1/e8m0", "compression": "float32"}
        return {
            "family": self.family,
            "entry_formats": formats,
            "dtypes": dtypes,
            "block_tokens": self.block_tokens,
            "row_bytes": self.block_bytes,
        }

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes; both ends of a transfer compare it (L1). spec/protocol.md, Identity: ``layout_fp``."""
        return _digest(
            self._row_identity
            | {
                "window": self.window,
                "backtracking": self.backtracking,
                "snapshot_bytes": self.snapshot_bytes,
                "slot_bytes": self.slot_bytes,
            }
        )

    @cached_property
    def row_fingerprint(self) -> bytes:
        """32 bytes; "layout_fp without ring" of the key namespace: what shapes a row's bytes, nothing of the slot.

        Snapshot keys add the wire ring themselves (keys.py), so two ring sizes share their blocks and nothing else.
        """
        return _digest(self._row_identity)


def _digest(fields: dict[str, object]) -> bytes:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).digest()


def _align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LayoutError(message)


def v41_layout(
    *,
    n_layers: int,
    n_draft_layers: int,
    compress_ratios: Sequence[int],
    kv_source_layers: Sequence[int],
    head_dim: int,
    index_head_dim: int,
    window: int,
    backtracking: int = 6,
    block_tokens: int = 128,
    entry_format: EntryFormat = "native",
) -> KVLayout:
    """Layout of DeepSeek-V4.1 (spec §17).

    Args are the config's numbers under their flat names (``n_mtp_layers`` is n_draft_layers); compress_ratios has one
    value per backbone layer, then one per draft layer. backtracking ≥ drafts + 1.

    Raises:
        LayoutError: a rule of spec §1.2 or §1.4 is broken.
    """
    ratios = tuple(compress_ratios)
    source_layers = tuple(kv_source_layers)
    _check_v41(n_layers, n_draft_layers, ratios, source_layers, window, backtracking, block_tokens)
    if entry_format == "native":
        _require(
            head_dim > 0 and head_dim % 32 == 0, f"head_dim {head_dim} must be a positive multiple of 32 (e8m0 groups)"
        )
        _require(
            index_head_dim > 0 and index_head_dim % 32 == 0,
            f"index_head_dim {index_head_dim} must be a positive multiple of 32 (e8m0 groups)",
        )
        entry = EntryBytes(
            main=head_dim // 2 + head_dim // 16,
            swa=head_dim + head_dim // 32,
            index_data=index_head_dim // 2,
            index_scale=index_head_dim // 32,
        )
    elif entry_format == "float32":
        _require(head_dim > 0 and index_head_dim > 0, "head_dim and index_head_dim must be positive")
        entry = EntryBytes(main=4 * head_dim, swa=4 * head_dim, index_data=4 * index_head_dim, index_scale=0)
    else:
        raise LayoutError(f"entry_format {entry_format!r} is neither 'native' nor 'float32'")

    sources: list[SourceSection] = []
    offset = 0
    for layer in source_layers:
        entries = block_tokens // ratios[layer]
        main_offset = offset + _align(entries * entry.index, SECTION_ALIGN)
        end = main_offset + _align(entries * entry.main, SECTION_ALIGN)
        sources.append(
            SourceSection(
                layer=layer,
                ratio=ratios[layer],
                entries=entries,
                index_offset=offset,
                index_scale_offset=offset + entries * entry.index_data,
                main_offset=main_offset,
                bytes=end - offset,
            )
        )
        offset = end
    block_bytes = _align(offset, lcm(128, entry.main))

    num_prefill_layers = next((layer for layer in range(n_layers) if ratios[layer] == 1), n_layers)
    ring_bytes = (window + backtracking) * entry.swa
    stride = _align(ring_bytes, SECTION_ALIGN)
    rings = tuple(
        RingSection(layer=layer, offset=layer * stride, bytes=ring_bytes, stored=layer < num_prefill_layers)
        for layer in range(n_layers + n_draft_layers)
    )
    compression: list[CompressionSection] = []
    offset = len(rings) * stride
    for layer in source_layers:
        if ratios[layer] > 1:
            tokens = ratios[layer] + backtracking - 1
            size = tokens * 2 * head_dim * 4
            compression.append(CompressionSection(layer, ratios[layer], tokens, offset, size))
            offset += size
    return KVLayout(
        family="deepseek_v41",
        entry_format=entry_format,
        kv_dtype="float32" if entry_format == "float32" else "bfloat16",
        block_tokens=block_tokens,
        window=window,
        backtracking=backtracking,
        block_bytes=block_bytes,
        snapshot_bytes=num_prefill_layers * stride,
        slot_bytes=_align(offset, lcm(SECTION_ALIGN, entry.swa)),
        head_dim=head_dim,
        index_head_dim=index_head_dim,
        num_layers=n_layers,
        num_prefill_layers=num_prefill_layers,
        entry_bytes=entry,
        sources=tuple(sources),
        rings=rings,
        compression=tuple(compression),
    )


def _check_v41(
    n_layers: int,
    n_draft_layers: int,
    ratios: tuple[int, ...],
    source_layers: tuple[int, ...],
    window: int,
    backtracking: int,
    block_tokens: int,
) -> None:
    _require(n_layers > 0, f"n_layers {n_layers} must be positive")
    _require(n_draft_layers >= 0, f"n_draft_layers {n_draft_layers} must not be negative")
    _require(window > 0, f"window {window} must be positive")
    _require(backtracking >= 1, f"backtracking {backtracking} must be at least 1 (drafts + 1)")
    _require(block_tokens > 0, f"block_tokens {block_tokens} must be positive")
    expected = n_layers + n_draft_layers
    _require(
        len(ratios) == expected, f"compress_ratios has {len(ratios)} values, n_layers + n_draft_layers is {expected}"
    )
    _require(all(ratio >= 0 for ratio in ratios), "compress_ratios must not be negative")
    _require(not any(ratios[n_layers:]), "draft layers have no compressed KV: their compress_ratios must be 0")
    _require(len(source_layers) > 0, "kv_source_layers is empty: a row would have no bytes")
    _require(list(source_layers) == sorted(set(source_layers)), "kv_source_layers must be ascending and unique")
    _require(source_layers[0] >= 0 and source_layers[-1] < n_layers, "kv_source_layers must name backbone layers")
    for layer in source_layers:
        ratio = ratios[layer]
        _require(ratio > 0, f"kv source {layer} has compress ratio 0")
        _require(
            block_tokens % ratio == 0, f"block_tokens {block_tokens} is no multiple of layer {layer}'s ratio {ratio}"
        )
    for layer in range(n_layers):
        if ratios[layer] > 0:
            owners = [source for source in source_layers if source <= layer]
            _require(bool(owners), f"layer {layer} has ratio {ratios[layer]} but no kv source at or before it")
            _require(
                ratios[owners[-1]] == ratios[layer],
                f"layer {layer} has ratio {ratios[layer]}, its kv source {owners[-1]} has {ratios[owners[-1]]}",
            )


def v3_layout(
    *,
    num_layers: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    kv_dtype: KVDtype = "bfloat16",
    block_tokens: int = 128,
) -> KVLayout:
    """Layout of DeepSeek-V3 (MLA): row = [layer][token][kv_lora ‖ rope] in kv_dtype, padded to 256 B; no slot.

    Raises:
        LayoutError: a number is not positive or the dtype is unknown.
    """
    for name, value in (
        ("num_layers", num_layers),
        ("kv_lora_rank", kv_lora_rank),
        ("qk_rope_head_dim", qk_rope_head_dim),
        ("block_tokens", block_tokens),
    ):
        _require(value > 0, f"{name} {value} must be positive")
    _require(kv_dtype in _DTYPE_BYTES, f"kv_dtype {kv_dtype!r} is none of {sorted(_DTYPE_BYTES)}")
    layer_bytes = block_tokens * (kv_lora_rank + qk_rope_head_dim) * _DTYPE_BYTES[kv_dtype]
    return KVLayout(
        family="deepseek_v3",
        entry_format="float32" if kv_dtype == "float32" else "native",
        kv_dtype=kv_dtype,
        block_tokens=block_tokens,
        window=0,
        backtracking=0,
        block_bytes=_align(num_layers * layer_bytes, V3_ROW_ALIGN),
        snapshot_bytes=0,
        slot_bytes=0,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        num_layers=num_layers,
        latents=tuple(LatentSection(layer, layer * layer_bytes, layer_bytes) for layer in range(num_layers)),
    )
