"""Moving and checking opaque rows: gather, scatter, copy, checksum. Plain torch; device kernels must match it exactly.

A row is uint8 [bytes] of one 2-d tensor. Rows of 114,048 B go over NVLink at 12.8 GB/s one by one and at 341 GB/s when
gathered into one piece first (design.md, Nouns: Block), hence gather and scatter as operators.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

_STAGED_BYTES = 64 << 20
"""Temporary memory of copy_rows on a device."""
_CHUNK_WORDS = 1 << 16
"""Words widened to int64 at a time: bounds the reference's temporary memory to a few MiB per row."""


def gather_rows(rows: torch.Tensor, indexes: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out[i] = rows[indexes[i]]``. rows [N, bytes] uint8, indexes [M] int64 on the same device, out [M, bytes]."""
    torch.index_select(_wide(rows), 0, indexes, out=_wide(out))
    return out


def scatter_rows(source: torch.Tensor, indexes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``rows[indexes[i]] = source[i]``; indexes are distinct. Returns rows."""
    _wide(rows).index_copy_(0, indexes, _wide(source))
    return rows


def copy_rows(source: torch.Tensor, source_indexes: torch.Tensor, rows: torch.Tensor, indexes: torch.Tensor) -> None:
    """``rows[indexes[i]] = source[source_indexes[i]]``: a gather and a scatter, at most 64 MiB at a time."""
    if source.device.type == "cpu":
        for origin, target in zip(source_indexes.tolist(), indexes.tolist(), strict=True):
            rows[target].copy_(source[origin])
        return
    step = max(1, _STAGED_BYTES // max(rows.shape[1], 1))
    for start in range(0, indexes.shape[0], step):
        staged = _wide(source).index_select(0, source_indexes[start : start + step])
        _wide(rows).index_copy_(0, indexes[start : start + step], staged)


def copy_rows_checksummed(
    source: torch.Tensor, source_indexes: torch.Tensor, rows: torch.Tensor, indexes: torch.Tensor
) -> torch.Tensor:
    """`copy_rows`, then `checksum_rows` of the copies: what the source holds by then plays no part."""
    copy_rows(source, source_indexes, rows, indexes)
    return checksum_rows(rows, indexes)


def checksum_rows(rows: torch.Tensor, indexes: torch.Tensor) -> torch.Tensor:
    """``lanes_64`` checksum of each chosen row: int64 [M], to be read as unsigned.

    Σᵢ wᵢ·xᵢ + splitmix64(n) mod 2⁶⁴ over the row's n little-endian 32-bit words xᵢ, wᵢ = splitmix64(i + 1) | 1. The sum
    has no order, so any number of lanes gives the same value. An odd wᵢ makes every change of one word visible; a row
    of zeros has the sum splitmix64(n), never 0. It guards against torn, stale and misplaced writes, not against
    forgery.

    Raises:
        ValueError: the row's bytes are no multiple of 4.
    """
    if rows.shape[1] % 4:
        raise ValueError(f"rows of {rows.shape[1]} bytes: lanes_64 needs a multiple of 4")
    words = rows.view(torch.int32)
    count = words.shape[1]
    weights = lane_weights(count, rows.device)
    sums = torch.full((indexes.shape[0],), lane_seed(count), dtype=torch.int64, device=rows.device)
    for start in range(0, count, _CHUNK_WORDS):
        chunk = words[:, start : start + _CHUNK_WORDS].index_select(0, indexes).to(torch.int64) & 0xFFFFFFFF
        sums += (chunk * weights[start : start + _CHUNK_WORDS]).sum(dim=1)
    return sums


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """The same memory in 8-byte elements where that is possible: byte-wise index kernels are slow."""
    aligned = rows.shape[1] % 8 == 0 and rows.stride(0) % 8 == 0 and rows.storage_offset() % 8 == 0
    return rows.view(torch.int64) if aligned else rows


def lane_seed(count: int) -> int:
    """splitmix64(n) of rows of n words, as int64."""
    return int(_splitmix64(np.array([count], dtype=np.uint64)).view(np.int64)[0])


@lru_cache(maxsize=32)
def lane_weights(count: int, device: torch.device) -> torch.Tensor:
    """w of words 0 … n − 1: int64 [n]."""
    values = _splitmix64(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(values.view(np.int64)).to(device)


def _splitmix64(value: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The finaliser of the splitmix64 generator at state value·0x9E3779B97F4A7C15, mod 2⁶⁴."""
    z = value * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
