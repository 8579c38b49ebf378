"""Seeds of choices in plain integers, as the router derives them too. No torch. SplitMix64's constants (spec §16)."""

from __future__ import annotations

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
CHOICE_STRIDE = 0xD1342543DE82EF95
MASK = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """SplitMix64's output function on ``value + gamma``."""
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def choice_seed(seed: int, choice: int) -> int:
    """Seed of choice ``choice``: the request's own for choice 0, so that n = 1 and the first of n agree."""
    return seed & MASK if choice == 0 else splitmix64(seed + choice * CHOICE_STRIDE)
