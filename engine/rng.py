"""Random numbers keyed by (seed of the choice, absolute position, purpose), never by batch, step or attempt (spec §16).

All arithmetic is modulo 2^64. On tensors it is done in int64, whose products and sums wrap; only the shift to the right
must be made logical.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from headrace.engine.seeds import GAMMA, MASK, MIX_1, MIX_2

UNIFORM_BITS = 53


class Purpose(IntEnum):
    """What a number is drawn for; one position may need several."""

    FRESH = 0
    """A token."""
    RESAMPLE = 1
    """A token after a rejected draft."""


def signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def _shift_right(value: torch.Tensor, count: int) -> torch.Tensor:
    return (value >> count) & ((1 << (64 - count)) - 1)


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = value + signed(GAMMA)
    value = (value ^ _shift_right(value, 30)) * signed(MIX_1)
    value = (value ^ _shift_right(value, 27)) * signed(MIX_2)
    return value ^ _shift_right(value, 31)


def uniform_bits(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose = Purpose.FRESH) -> torch.Tensor:
    """53 random bits per row as int64, from ``seeds [S]`` int64 (bits of an unsigned seed) and ``positions [S]``."""
    keyed = (3 * positions.to(torch.int64) + int(purpose)) * signed(GAMMA)
    return _shift_right(_mix(seeds + (keyed ^ (keyed << 13))), 64 - UNIFORM_BITS)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose = Purpose.FRESH) -> torch.Tensor:
    """``[S]`` float64 in [0, 1)."""
    return uniform_bits(seeds, positions, purpose).to(torch.float64) * 2.0**-UNIFORM_BITS
