"""Quantisers of activations and cache entries (spec §3) and the byte records of the caches (spec §17.1).

Groups are consecutive channels of the last axis; arithmetic is float32; a round trip returns the dtype it was given.
Every dequantised value is exact in bf16 and in float32, so a round trip and encode-then-decode agree bit for bit.
"""

from __future__ import annotations

from functools import cache

import torch

E4M3_GROUP = 32
INDEX_GROUP = 32
MAIN_GROUP = 16
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E4M3_FLOOR = 1e-4
"""Smallest amax of an e4m3 group; §3.5: an all-zero group gets a scale, never 0."""
INDEX_FLOOR = 6.0 * 2.0**-126
MAIN_FLOOR = 6.0 * 2.0**-9

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pow2_ceil_byte(value: torch.Tensor) -> torch.Tensor:
    """E8M0 byte (exponent + 127) of ``2^ceil(log2 value)`` for positive normal float32: exact, by the bit pattern."""
    bits = value.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return exponent.clamp(1, 254).to(torch.uint8)


def e8m0_to_float(byte: torch.Tensor) -> torch.Tensor:
    """``2^(byte − 127)`` float32 of uint8 or float8_e8m0fnu; byte 0 is 2^-127, a float32 denormal."""
    exponent = byte.view(torch.uint8).to(torch.int32)
    return torch.where(exponent == 0, 0x00400000, exponent << 23).view(torch.float32)


def pow2_scale_byte(amax: torch.Tensor, maximum: float) -> torch.Tensor:
    """E8M0 byte of ``P(amax · fl32(1/maximum))`` (§3)."""
    return pow2_ceil_byte(amax * amax.new_full((), 1.0 / maximum))


def _split_last(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], -1, size)


def _groups(x: torch.Tensor, size: int) -> torch.Tensor:
    if x.shape[-1] % size:
        raise ValueError(f"last axis of {tuple(x.shape)} is not a multiple of the quantiser group {size}")
    return _split_last(x.float(), size)


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 uint8 of the nearest e2m1 value: ties to the even code, saturated at 6, sign kept (§3.4)."""
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    for bound, inclusive in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (a >= bound) if inclusive else (a > bound)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of codes 0..15."""
    return _e2m1_table(codes.device)[codes.long()]


@cache
def _e2m1_table(device: torch.device) -> torch.Tensor:
    """Uploaded once: a step may not copy from the host, and a captured one cannot."""
    return torch.tensor(_E2M1_VALUES + tuple(-v for v in _E2M1_VALUES), dtype=torch.float32, device=device)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """``uint8 [..., n] → [..., n/2]``: the even channel in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_nibbles`; takes int8 or uint8, gives uint8 codes."""
    raw = packed.view(torch.uint8)
    return torch.stack((raw & 0xF, raw >> 4), dim=-1).flatten(-2)


def quantise_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """§3.1: ``[..., n] → codes [..., n] float8_e4m3fn, scale bytes [..., n/32] uint8``."""
    g = _groups(x, E4M3_GROUP)
    byte = pow2_scale_byte(g.abs().amax(-1).clamp_min(E4M3_FLOOR), E4M3_MAX)
    scaled = (g / e8m0_to_float(byte).unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).flatten(-2), byte


def dequantise_e4m3(codes: torch.Tensor, scale_bytes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    g = _split_last(codes.float(), E4M3_GROUP)
    return (g * e8m0_to_float(scale_bytes).unsqueeze(-1)).flatten(-2).to(dtype)


def quantise_fp4_index(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """§3.2: ``[..., n] → packed codes [..., n/2] uint8, scale bytes [..., n/32] uint8``."""
    g = _groups(x, INDEX_GROUP)
    byte = pow2_scale_byte(g.abs().amax(-1).clamp_min(INDEX_FLOOR), E2M1_MAX)
    return pack_nibbles(e2m1_codes(g / e8m0_to_float(byte).unsqueeze(-1)).flatten(-2)), byte


def dequantise_fp4_index(packed: torch.Tensor, scale_bytes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    g = _split_last(e2m1_values(unpack_nibbles(packed)), INDEX_GROUP)
    return (g * e8m0_to_float(scale_bytes).unsqueeze(-1)).flatten(-2).to(dtype)


def quantise_fp4_main(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """§3.3: ``[..., n] → packed codes [..., n/2] uint8, scales [..., n/16] float8_e4m3fn``. Values are divided by the
    rounded scale (a reciprocal product differs at exact ties)."""
    g = _groups(x, MAIN_GROUP)
    scale = (g.abs().amax(-1).clamp_min(MAIN_FLOOR) / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    return pack_nibbles(e2m1_codes(g / scale.float().unsqueeze(-1)).flatten(-2)), scale


def dequantise_fp4_main(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    g = _split_last(e2m1_values(unpack_nibbles(packed)), MAIN_GROUP)
    return (g * scales.float().unsqueeze(-1)).flatten(-2).to(dtype)


def round_trip_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x after §3.1 (linear inputs, sliding-window KV)."""
    return dequantise_e4m3(*quantise_e4m3(x), x.dtype)


def round_trip_fp4_index(x: torch.Tensor) -> torch.Tensor:
    """x after §3.2 (index queries and keys)."""
    return dequantise_fp4_index(*quantise_fp4_index(x), x.dtype)


def round_trip_fp4_main(x: torch.Tensor) -> torch.Tensor:
    """x after §3.3 (compressed KV)."""
    return dequantise_fp4_main(*quantise_fp4_main(x), x.dtype)


def encode_swa(x: torch.Tensor) -> torch.Tensor:
    """Sliding-window entry: D e4m3 bytes, then D/32 scale bytes (528 at D = 512)."""
    codes, byte = quantise_e4m3(x)
    return torch.cat((codes.view(torch.uint8), byte), dim=-1)


def decode_swa(entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    width = entries.shape[-1] * E4M3_GROUP // (E4M3_GROUP + 1)
    return dequantise_e4m3(entries[..., :width].view(torch.float8_e4m3fn), entries[..., width:].contiguous(), dtype)


def encode_main(x: torch.Tensor) -> torch.Tensor:
    """Compressed entry: D/2 code bytes, then D/16 e4m3 scales (288 at D = 512)."""
    packed, scale = quantise_fp4_main(x)
    return torch.cat((packed, scale.view(torch.uint8)), dim=-1)


def decode_main(entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    data = entries.shape[-1] * 8 // 9
    return dequantise_fp4_main(entries[..., :data], entries[..., data:].view(torch.float8_e4m3fn), dtype)


def encode_index(x: torch.Tensor) -> torch.Tensor:
    """Index entry: I/2 code bytes, then I/32 scale bytes (68 at I = 128). A block keeps data and scales apart."""
    return torch.cat(quantise_fp4_index(x), dim=-1)


def decode_index(entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    data = entries.shape[-1] * 16 // 17
    return dequantise_fp4_index(entries[..., :data], entries[..., data:].contiguous(), dtype)


def encode_index_section(x: torch.Tensor) -> torch.Tensor:
    """``[n, I] → uint8 [n·(I/2 + I/32)]``: data of all entries, then scales of all entries (§17.1)."""
    packed, byte = quantise_fp4_index(x)
    return torch.cat((packed.flatten(), byte.flatten()))


def widen_fp8_weight(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """fp8 weight → plain ``[out, in]``: scale row ⌊row/32⌋, column ⌊col/32⌋ (§2). Exact in bf16 and float32."""
    rows, columns = values.shape
    s = e8m0_to_float(scales).repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
    return (values.float() * s).to(dtype)


def widen_fp4_weight(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """fp4 weight → plain ``[out, in]``: one scale per row and 32 input channels (§2). Exact in bf16 and float32."""
    return dequantise_fp4_index(packed.view(torch.uint8), scales.view(torch.uint8), dtype)
