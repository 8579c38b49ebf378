"""Selection of operators, numeric modes, activations."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from headrace.kernels.modes import NumericMode, Numerics
from headrace.kernels.ops import Operators
from headrace.kernels.reference.activation import sigmoid, silu, softplus
from headrace.kernels.select import UnsupportedKernels, select


def test_every_operator_is_reported() -> None:
    chosen = select(torch.device("cpu"))
    assert [name for name, _ in chosen.backends] == [field.name for field in fields(Operators)]


def test_batch_invariance_is_refused_off_the_cpu() -> None:
    with pytest.raises(UnsupportedKernels, match="CPU only"):
        select(torch.device("cuda"), batch_invariant=True)


def test_modes_are_three_switches() -> None:
    assert [(m.activation_dtype, m.quantises_kv, m.quantises_linears) for m in NumericMode] == [
        (torch.float32, False, False),
        (torch.float32, True, False),
        (torch.bfloat16, True, True),
    ]
    with pytest.raises(ValueError, match="noquant or kvquant"):
        Numerics(NumericMode.FULL, batch_invariant=True)


def test_activations_match_torch() -> None:
    x = torch.cat((torch.linspace(-30, 30, 1001), torch.tensor([-1e4, 1e4, 0.0, -0.0])))
    assert torch.allclose(sigmoid(x), torch.sigmoid(x), rtol=1e-6, atol=0)
    assert torch.allclose(silu(x), torch.nn.functional.silu(x), rtol=1e-6, atol=1e-30)
    assert torch.allclose(softplus(x), torch.nn.functional.softplus(x, threshold=60), rtol=1e-6, atol=1e-30)
