"""Numeric modes (spec §19): what is quantised, and in which type activations live.

A mode is a property of a loaded model, never of a call: it decides how the loader widens weights, what the caches
hold, and nothing inside an operator branches on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch


class NumericMode(StrEnum):
    """The three switches of spec §19 as one name; part of the model fingerprint."""

    NOQUANT = "noquant"
    """float32 everywhere, weights widened at load, every quantiser round trip off."""
    KVQUANT = "kvquant"
    """float32 arithmetic and weights; KV and index entries pass through their cache format."""
    FULL = "full"
    """bf16 activations, fp8 and fp4 weights on e4m3 activations, KV and index entries quantised."""

    @property
    def activation_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self is NumericMode.FULL else torch.float32

    @property
    def quantises_kv(self) -> bool:
        """Whether KV and index entries pass through the formats of spec §3.1–3.3."""
        return self is not NumericMode.NOQUANT

    @property
    def quantises_linears(self) -> bool:
        """Whether fp8 and fp4 weights stay quantised and their inputs pass through spec §3.1."""
        return self is NumericMode.FULL


@dataclass(frozen=True)
class Numerics:
    """Mode of a loaded model, and whether a row's result may depend on the rows beside it."""

    mode: NumericMode
    batch_invariant: bool = False
    """L5: the same bytes for a row whatever the batch and the chunking. float32 on the CPU only."""

    def __post_init__(self) -> None:
        if self.batch_invariant and self.mode is NumericMode.FULL:
            raise ValueError("batch_invariant needs float32 arithmetic: choose numeric mode noquant or kvquant")
