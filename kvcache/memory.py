"""Memory for pools and landing regions: zero, contiguous, and on the host taken from the system only when touched."""

from __future__ import annotations

import mmap

import torch


def zeroed(count: int, size: int, device: torch.device | str = "cpu", *, pin_memory: bool = False) -> torch.Tensor:
    """uint8 [count, size] of zeros.

    Unpinned host memory is an anonymous mapping: a pool of gigabytes costs nothing at the start, and each page comes,
    zero and page-aligned, when a row is first written. `torch.zeros` would touch all of it.
    """
    device = torch.device(device)
    if device.type != "cpu" or pin_memory or count * size == 0:
        return torch.zeros((count, size), dtype=torch.uint8, device=device, pin_memory=pin_memory)
    mapping = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The tensor keeps the mapping alive and gives it back with its own end.
    return torch.frombuffer(mapping, dtype=torch.uint8).view(count, size)


def host_slabs(slabs: int, slab_bytes: int, *, pin_memory: bool | None = None) -> torch.Tensor:
    """Memory of a host tier: uint8 [slabs, slab_bytes], page-locked where CUDA is there unless told otherwise (copies
    to a device from pageable memory go through a bounce buffer)."""
    return zeroed(slabs, slab_bytes, pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory)


def buffer_of(memory: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor on the host, writable."""
    return memory.numpy().data.cast("B") if memory.numel() else memoryview(bytearray())
