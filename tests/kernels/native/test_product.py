"""Products and exponentials of the C++ library against torch, and the property that L5 rests on."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compiler import NativeUnavailable
from headrace.kernels.native.build import NativeLibrary, load_native, native_exp, native_product


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    try:
        return load_native()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


def operands(m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator).to(dtype)


SIZES = st.integers(1, 70)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=60, deadline=None)
@given(m=SIZES, n=SIZES, k=SIZES | st.sampled_from([768, 800, 1536, 1600]), dtype=DTYPES, packed=st.booleans())
def test_agrees_with_torch(library: NativeLibrary, m: int, n: int, k: int, dtype: torch.dtype, packed: bool) -> None:
    """Every remainder of tiles, vectors, panels and cuts, in both orders of summation."""
    x, weight = operands(m, n, k, dtype, seed=m * n + k)
    expected = x.double() @ weight.double().T
    got = native_product(library, x, weight, packed=packed)
    assert (got - expected).abs().max() <= 2e-6 * k**0.5 * max(float(expected.abs().max()), 1.0)


@settings(max_examples=40, deadline=None)
@given(
    n=SIZES,
    k=st.one_of(SIZES, st.sampled_from([576, 1536])),
    dtype=DTYPES,
    cuts=st.lists(st.integers(1, 63), max_size=4, unique=True).map(sorted),
)
def test_a_row_does_not_depend_on_the_others(
    library: NativeLibrary, n: int, k: int, dtype: torch.dtype, cuts: list[int]
) -> None:
    """L5: 64 rows in any pieces are the same bytes."""
    x, weight = operands(64, n, k, dtype, seed=n + k)
    whole = native_product(library, x, weight, packed=False)
    bounds = [0, *cuts, 64]
    for start, end in pairwise(bounds):
        assert torch.equal(native_product(library, x[start:end].contiguous(), weight, packed=False), whole[start:end])


def test_exponential(library: NativeLibrary) -> None:
    """2e-7 relative from −87 to 88; below, the smallest value, which a softmax does not notice."""
    x = torch.linspace(-87, 88, 16 * 5000)
    assert (native_exp(library, x) / x.double().exp() - 1).abs().max() <= 3e-7
    assert native_exp(library, torch.full((16,), -1e9)).max() <= 2e-38
