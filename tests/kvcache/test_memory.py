"""kvcache.memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from headrace.kvcache.memory import buffer_of, host_slabs, zeroed


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_untouched_memory_is_not_taken() -> None:
    """A worker with gigabytes of KV starts in seconds and holds what its sequences use."""
    before = resident_bytes()
    memory = zeroed(1024, 1 << 20)
    assert resident_bytes() - before < 1 << 28
    memory[7] = 3
    assert int(memory[6].sum()) == 0
    assert int(memory[7, -1]) == 3
    assert memory.is_contiguous()
    assert memory.data_ptr() % 4096 == 0
    held = resident_bytes()
    del memory
    gc.collect()
    assert resident_bytes() < held


@pytest.mark.parametrize(("count", "size"), [(0, 10), (3, 0), (1, 1), (5, 4097)])
def test_any_shape(count: int, size: int) -> None:
    memory = zeroed(count, size)
    assert memory.shape == (count, size)
    assert memory.dtype == torch.uint8
    assert int(memory.sum()) == 0


def test_memory_of_a_host_tier_is_seen_as_bytes() -> None:
    slabs = host_slabs(3, 4096)
    view = buffer_of(slabs)
    assert (slabs.shape, view.nbytes, view.readonly) == ((3, 4096), 3 * 4096, False)
    view[4096] = 7
    assert slabs[1, 0] == 7
    assert buffer_of(host_slabs(0, 4096)).nbytes == 0
