"""Sampling fields are refused at the border, by name (L10, L13)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("inf")),
        ("top_k", -1),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logit_bias", ((5, 101.0),)),
        ("logit_bias", ((5, float("nan")),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((5, 1.0), (5, 2.0))),
        ("logit_bias", tuple((i, 1.0) for i in range(1025))),
    ],
)
def test_a_field_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(EngineError, match=rf"sampling\.{field}") as caught:
        SamplingParams(**{field: value})
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_biases_stay_in_the_vocabulary() -> None:
    SamplingParams(logit_bias=((99, 1.0),)).check_vocabulary(100)
    with pytest.raises(EngineError, match="outside the vocabulary of 99"):
        SamplingParams(logit_bias=((99, 1.0),)).check_vocabulary(99)


def test_what_a_row_needs_is_known_beforehand() -> None:
    assert not SamplingParams().greedy
    assert SamplingParams(temperature=0.0, top_p=0.5).greedy
    assert not SamplingParams(temperature=0.0, top_p=0.5).truncates
    assert SamplingParams(top_k=3).truncates
    assert SamplingParams(repetition_penalty=1.1).penalises


def test_the_border_needs_no_torch() -> None:
    """Routers check requests too."""
    code = "import headrace.engine.sampling_params, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
