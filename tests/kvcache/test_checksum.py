"""Checksums against plain arithmetic, and what they must notice."""

from __future__ import annotations

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.reference.rows import checksum_rows, copy_rows, gather_rows, scatter_rows
from headrace.kernels.rows import row_ops
from headrace.kvcache.checksum import checksums
from headrace.kvcache.handle import ChecksumKind

MASK = 2**64 - 1


def splitmix64(value: int) -> int:
    z = value * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def plain_lanes(row: bytes) -> int:
    """Twin in Python integers."""
    words = [int.from_bytes(row[at : at + 4], "little") for at in range(0, len(row), 4)]
    return (sum((splitmix64(i + 1) | 1) * word for i, word in enumerate(words)) + splitmix64(len(words))) & MASK


def tensor(rows: list[bytes]) -> torch.Tensor:
    return torch.tensor([list(row) for row in rows], dtype=torch.uint8)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 40).flatmap(lambda words: st.lists(st.binary(min_size=4 * words, max_size=4 * words), min_size=1))
)
def test_lanes_equal_plain_arithmetic(rows: list[bytes]) -> None:
    indexes = list(range(len(rows)))[::-1]
    assert checksums(tensor(rows), indexes, ChecksumKind.LANES_64) == tuple(plain_lanes(rows[i]) for i in indexes)


def test_long_rows_are_summed_in_pieces() -> None:
    rows = torch.randint(0, 256, (2, 4 * 70_000), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert checksums(rows, [1], ChecksumKind.LANES_64) == (plain_lanes(bytes(rows[1].tolist())),)


def test_golden_sums() -> None:
    """Both ends of a transfer may run different builds: the values are pinned."""
    rows = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    assert checksums(rows, [0, 1], ChecksumKind.LANES_64) == LANES
    assert checksums(rows, [0, 1], ChecksumKind.XXH3_64) == XXH3
    assert XXH3[0] == xxhash.xxh3_64_intdigest(bytes(range(128)))


LANES = (7977114933809054757, 8628100928164884773)
XXH3 = (9639417669764826219, 15062402725479151476)


@pytest.mark.parametrize("kind", list(ChecksumKind))
def test_every_damage_of_a_transfer_is_noticed(kind: ChecksumKind) -> None:
    """L1: a flipped bit, swapped words, a torn tail, zeros that never landed, the row of a neighbour."""
    good = torch.randint(0, 256, (64 * 4,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    damaged = [good.clone() for _ in range(5)]
    damaged[0][17] ^= 1
    damaged[1][:4], damaged[1][4:8] = good[4:8], good[:4]
    damaged[2][100:] = 0
    damaged[3].zero_()
    damaged[4].copy_(good.roll(4))
    rows = torch.stack([good, *damaged])
    first, *others = checksums(rows, range(6), kind)
    assert first not in others
    assert len(set(others)) == len(others)


def test_a_zero_row_has_no_zero_sum() -> None:
    assert checksums(torch.zeros((1, 64), dtype=torch.uint8), [0], ChecksumKind.LANES_64) != (0,)


def test_no_rows_have_no_sums() -> None:
    assert checksums(torch.zeros((1, 64), dtype=torch.uint8), [], ChecksumKind.XXH3_64) == ()


def test_what_cannot_be_summed_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        checksums(torch.zeros((1, 6), dtype=torch.uint8), [0], ChecksumKind.LANES_64)
    with pytest.raises(ValueError, match="use lanes_64"):
        checksums(torch.zeros((1, 8), dtype=torch.uint8, device="meta"), [0], ChecksumKind.XXH3_64)


@pytest.mark.parametrize("size", [24, 12, 7])
def test_gather_and_scatter_are_inverse(size: int) -> None:
    rows = torch.randint(0, 256, (6, size), dtype=torch.uint8)
    indexes = torch.tensor([4, 0, 2])
    staged = gather_rows(rows, indexes, torch.empty((3, size), dtype=torch.uint8))
    assert torch.equal(staged, rows[indexes])
    target = torch.zeros_like(rows)
    scatter_rows(staged, indexes, target)
    assert torch.equal(target[indexes], rows[indexes])
    assert target[[1, 3, 5]].count_nonzero() == 0
    copied = torch.zeros_like(rows)
    copy_rows(rows, indexes, copied, torch.tensor([1, 3, 5]))
    assert torch.equal(copied[[1, 3, 5]], rows[indexes])


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("size", [4, 1024, 114_048])
def test_every_backend_copies_and_sums_as_the_reference(device: str, size: int) -> None:
    """L1: the sums of copies are those of the bytes that were copied, and nothing else is written."""
    source = torch.randint(0, 256, (7, size), dtype=torch.uint8)
    origins, places = torch.tensor([6, 0, 3]), torch.tensor([1, 4, 2])
    target = torch.zeros((5, size), dtype=torch.uint8, device=device)
    ops = row_ops(device)
    sums = ops.copy_checksummed(source.to(device), origins.to(device), target, places.to(device))
    expected = torch.zeros((5, size), dtype=torch.uint8)
    expected[places] = source[origins]
    assert torch.equal(target.cpu(), expected)
    assert torch.equal(sums.cpu(), checksum_rows(source, origins))
    assert torch.equal(ops.checksum(target, places.to(device)).cpu(), sums.cpu())
    assert ops.checksum(target, places[:0].to(device)).shape == (0,)
    if device == "cuda":
        assert ops.backend == "triton"


@CUDA
def test_the_device_gives_the_host_sums() -> None:
    rows = torch.randint(0, 256, (5, 114_048), dtype=torch.uint8)
    indexes = torch.tensor([3, 1])
    assert torch.equal(checksum_rows(rows.cuda(), indexes.cuda()).cpu(), checksum_rows(rows, indexes))
