"""Engram: constants, ragged context, hash, lookup (spec §13)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.reference.engram import engram_constants, engram_context, engram_gate, engram_hash, engram_lookup
from headrace.kernels.weights import Fp8Rows

N = 4
PAD = 2
MAP = (torch.arange(50) * 7) % 20


def test_constants_of_the_published_config() -> None:
    """Check values of spec §13."""
    constants = engram_constants((1, 14), 4, 8, 16_000_000, 99_092)
    assert constants.primes[0, 0, :3].tolist() == [16000057, 16000079, 16000081]
    assert constants.primes[-1, -1, -1].item() == 16000889
    assert constants.multipliers[0].tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert constants.table_rows.tolist() == [384006168, 384016682]
    assert constants.primes.unique().numel() == constants.primes.numel()


def plain_context(history: list[int], images: list[bool], position: int) -> list[int]:
    """Twin: compressed ids at p, p−1, …, blocked from the first image on."""
    out, blocked = [], False
    for k in range(N):
        at = position - k
        blocked = blocked or (at >= 0 and images[at])
        out.append(PAD if at < 0 or blocked else int(MAP[history[at]]))
    return out


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_context_of_ragged_chunks_is_that_of_the_whole(data: st.DataObject) -> None:
    """§18.1: N − 1 ids of look-back make any chunking equal to one shot, images included."""
    token_ids, image_mask, sequence, offset, lookback, expected = [], [], [], [], [], []
    for b in range(data.draw(st.integers(1, 3))):
        length = data.draw(st.integers(1, 12))
        history = data.draw(st.lists(st.integers(0, 49), min_size=length, max_size=length))
        images = data.draw(st.lists(st.sampled_from([False, False, True]), min_size=length, max_size=length))
        start = data.draw(st.integers(0, length - 1))
        before = [-1] * (N - 1) + [-2 if image else token for token, image in zip(history, images, strict=True)][:start]
        lookback.append(before[-(N - 1) :])
        for position in range(start, length):
            token_ids.append(history[position])
            image_mask.append(images[position])
            sequence.append(b)
            offset.append(position - start)
            expected.append(plain_context(history, images, position))
    got = engram_context(
        torch.tensor(token_ids), torch.tensor(image_mask), torch.tensor(sequence), torch.tensor(offset),
        torch.tensor(lookback), MAP, PAD,
    )  # fmt: skip
    assert got.tolist() == expected


def test_ids_outside_the_map_block_like_images() -> None:
    """L13: no id crashes the worker."""
    ids = torch.tensor([3, 10**9, -5, 4])
    got = engram_context(
        ids, torch.zeros(4, dtype=torch.bool), torch.zeros(4).long(), torch.arange(4), torch.full((1, 3), -1), MAP, PAD
    )
    assert got[:, 0].tolist() == [int(MAP[3]), PAD, PAD, int(MAP[4])]
    assert got[3].tolist() == [int(MAP[4]), PAD, PAD, PAD]


def test_the_hash_matches_unbounded_integers() -> None:
    constants = engram_constants((1,), N, 2, 101, 300)
    context = torch.randint(0, 300, (20, N), generator=torch.Generator().manual_seed(0))
    got = engram_hash(context, constants.multipliers[0], constants.primes[0], constants.offsets[0])
    multipliers, primes = constants.multipliers[0].tolist(), constants.primes[0].tolist()
    offsets = constants.offsets[0].tolist()
    for row, ids in enumerate(context.tolist()):
        mixed, column = ids[0] * multipliers[0], 0
        for n in range(1, N):
            mixed ^= ids[n] * multipliers[n]
            for prime in primes[n - 1]:
                assert got[row, column] == mixed % prime + offsets[column]
                column += 1


def test_shards_of_a_table_add_up() -> None:
    values = torch.randn(10, 32, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 130, (10, 1), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    rows = torch.tensor([[0, 9], [4, 5], [-1, 10]])
    whole = engram_lookup(rows, Fp8Rows(values, scales), torch.float32)
    parts = engram_lookup(rows, Fp8Rows(values[:5], scales[:5]), torch.float32) + engram_lookup(
        rows - 5, Fp8Rows(values[5:], scales[5:]), torch.float32
    )
    assert torch.equal(whole[:2], parts[:2])
    assert not whole[2].any()


@pytest.mark.parametrize("image", [True, False])
def test_image_rows_pass_the_gate_unchanged(image: bool) -> None:
    streams, value = torch.randn(1, 4, 8), torch.ones(1, 8)
    out = engram_gate(streams, streams, value, torch.ones(4, 8), torch.ones(4, 8), torch.tensor([image]), 1e-20)
    assert torch.equal(out, streams) is image
