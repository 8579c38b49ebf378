"""Random numbers keyed by seed, position and purpose (spec §16, spec/protocol.md "Exactness")."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.rng import Purpose, signed, uniform, uniform_bits
from headrace.engine.seeds import choice_seed, splitmix64

MASK = (1 << 64) - 1
seeds = st.integers(0, MASK)
positions = st.integers(0, 1 << 20)


def plain_bits(seed: int, position: int, purpose: int) -> int:
    """Twin in unbounded integers."""
    q = (3 * position + purpose) * 0x9E3779B97F4A7C15 & MASK
    z = (seed + (q ^ (q << 13 & MASK))) & MASK
    return splitmix64(z) >> 11


@given(st.lists(st.tuples(seeds, positions), min_size=1, max_size=8), st.sampled_from(Purpose))
def test_tensor_arithmetic_matches_unbounded_integers(rows: list[tuple[int, int]], purpose: Purpose) -> None:
    got = uniform_bits(
        torch.tensor([signed(seed) for seed, _ in rows]), torch.tensor([position for _, position in rows]), purpose
    )
    assert got.tolist() == [plain_bits(seed, position, purpose) for seed, position in rows]


def test_splitmix64_matches_its_published_sequence() -> None:
    """First outputs of SplitMix64 from seed 0: state k·gamma, finalised."""
    gamma = 0x9E3779B97F4A7C15
    assert [splitmix64(k * gamma & MASK) for k in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(seeds)
def test_choice_0_is_the_request(seed: int) -> None:
    """spec/protocol.md: choice 0 of n equals n = 1; others differ and follow the stated formula."""
    assert choice_seed(seed, 0) == seed
    others = [choice_seed(seed, i) for i in range(1, 9)]
    assert others[1] == splitmix64((seed + 2 * 0xD1342543DE82EF95) & MASK)
    assert len({seed, *others}) == 9


def test_numbers_are_uniform_and_purposes_differ() -> None:
    at = torch.arange(20000)
    seed = torch.full_like(at, 12345)
    u = uniform(seed, at)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert abs(u.mean().item() - 0.5) < 0.01
    counts = torch.histc(u.float(), bins=10, min=0, max=1)
    assert (counts - 2000).abs().max() < 250
    assert not torch.equal(u, uniform(seed, at, Purpose.RESAMPLE))
