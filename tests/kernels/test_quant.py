"""Quantisers against plain twins (spec §3)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.kernels.reference import quant

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)


def nearest_e2m1(value: float) -> int:
    """Plain twin: nearest value, ties to the even code, the sign in bit 3."""
    magnitude = abs(value)
    code = min(range(8), key=lambda i: (abs(E2M1[i] - magnitude), i % 2))
    return code | (8 if math.copysign(1.0, value) < 0 else 0)


@given(
    st.lists(st.one_of(finite, st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0, -0.25, -5.0])), min_size=1)
)
def test_e2m1_codes_are_nearest(numbers: list[float]) -> None:
    codes = quant.e2m1_codes(torch.tensor(numbers, dtype=torch.float32))
    wide = torch.tensor(numbers, dtype=torch.float32).tolist()
    assert codes.tolist() == [nearest_e2m1(v) for v in wide]


@given(st.integers(-120, 120), st.floats(1.0, 2.0, width=32, exclude_max=True))
def test_scales_are_the_next_power_of_two(exponent: int, mantissa: float) -> None:
    value = torch.tensor([mantissa], dtype=torch.float32) * 2.0**exponent
    scale = quant.e8m0_to_float(quant.pow2_ceil_byte(value)).item()
    assert scale == (2.0**exponent if mantissa == 1.0 else 2.0 ** (exponent + 1))


def test_every_e8m0_byte_is_its_power_of_two() -> None:
    values = quant.e8m0_to_float(torch.arange(255, dtype=torch.uint8))
    assert values.double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("encode", "decode", "round_trip", "size"),
    [
        (quant.encode_swa, quant.decode_swa, quant.round_trip_e4m3, 512 + 16),
        (quant.encode_main, quant.decode_main, quant.round_trip_fp4_main, 256 + 32),
        (quant.encode_index, quant.decode_index, quant.round_trip_fp4_index, 256 + 16),
    ],
)
def test_a_cache_entry_holds_what_the_round_trip_gives(encode, decode, round_trip, size, dtype) -> None:  # type: ignore[no-untyped-def]
    """What decode reads from the cache is bit for bit what prefill computed with (spec §17.1)."""
    x = (torch.randn(11, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 4, 11)[:, None]).to(
        dtype
    )
    entry = encode(x)
    assert entry.dtype == torch.uint8
    assert entry.shape == (11, size)
    assert torch.equal(decode(entry, dtype), round_trip(x))
    assert round_trip(x).dtype == dtype


@pytest.mark.parametrize("round_trip", [quant.round_trip_e4m3, quant.round_trip_fp4_index])
def test_values_survive_a_second_round_trip(round_trip) -> None:  # type: ignore[no-untyped-def]
    """Power-of-two scales: the values stay, though scale and codes may not. The main format promises neither."""
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 50)[:, None]
    once = round_trip(x)
    assert torch.equal(round_trip(once), once)


def test_an_all_zero_group_has_a_scale() -> None:
    """§3.5: never 0."""
    zeros = torch.zeros(1, 32)
    assert quant.e8m0_to_float(quant.quantise_e4m3(zeros)[1]).item() == 2.0 ** math.ceil(math.log2(1e-4 / 448))
    assert quant.e8m0_to_float(quant.quantise_fp4_index(zeros)[1]).item() == 2.0**-126
    assert quant.quantise_fp4_main(zeros)[1].float().unique().item() == 2.0**-9


@given(st.lists(st.integers(0, 15), min_size=2, max_size=32).filter(lambda codes: len(codes) % 2 == 0))
def test_nibbles_pack_even_channel_low(codes: list[int]) -> None:
    packed = quant.pack_nibbles(torch.tensor(codes, dtype=torch.uint8))
    assert packed.tolist() == [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    assert quant.unpack_nibbles(packed).tolist() == codes
    assert quant.unpack_nibbles(packed.view(torch.int8)).tolist() == codes


def test_a_width_that_is_no_multiple_of_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the quantiser group 32"):
        quant.round_trip_e4m3(torch.zeros(2, 40))
