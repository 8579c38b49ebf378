"""Checksums of rows, slots and snapshots, by kind (L1, L3): computed by the sender, verified after landing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from headrace.kernels.rows import row_ops
from headrace.kernels.upload import upload
from headrace.kvcache.handle import ChecksumKind


def checksums(items: torch.Tensor, indexes: Sequence[int], kind: ChecksumKind) -> tuple[int, ...]:
    """Unsigned 64-bit checksum of ``items[i]`` for each index; items uint8 [N, bytes], contiguous rows.

    On a device this waits for the kernel (the sums are read back).

    Raises:
        ValueError: xxh3_64 of device memory (ask for lanes_64), or lanes_64 of rows that are no multiple of 4 bytes.
    """
    if not indexes:
        return ()
    if kind is ChecksumKind.LANES_64:
        return unsigned(row_ops(items.device.type).checksum(items, upload(indexes, torch.int64, items.device)))
    if items.device.type != "cpu":
        raise ValueError(f"xxh3_64 is for host memory, these rows are on {items.device}: use lanes_64")
    array = items.numpy()
    return tuple(xxhash.xxh3_64_intdigest(array[index].data) for index in indexes)


def warm_up(items: torch.Tensor) -> None:
    """Build the device's kernels now rather than under the first transfer: item 0 is summed and copied onto itself."""
    if items.device.type != "cpu":
        first = upload((0,), torch.int64, items.device)
        ops = row_ops(items.device.type)
        ops.checksum(items, first)
        ops.copy_checksummed(items, first, items, first)


def unsigned(sums: torch.Tensor) -> tuple[int, ...]:
    """int64 sums of a kernel as unsigned numbers, read back to the host."""
    return tuple(value & 0xFFFFFFFFFFFFFFFF for value in sums.tolist())
