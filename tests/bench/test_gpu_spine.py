"""The GPU script without a GPU: the same checks on the CPU, and that its comparisons can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu.compare import compare_logits, compare_tokens, first_difference
from bench.gpu.tiny import request
from headrace.engine.events import TokenLogprob
from headrace.engine.offline import ChoiceResult, Completion

ROOT = Path(__file__).resolve().parents[2]


BARE_MACHINE = """
import sys
absent = {"cryptography", "deepseek_recipe", "grpc", "interegular", "jsonschema", "pydantic", "redis", "referencing",
          "structlog", "tokenizers", "tvm_ffi", "typer", "xgrammar"}
class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent)
"""
"""A GPU machine has torch, numpy, safetensors, xxhash and the NIXL wheel."""


def test_two_processes_give_the_tokens_of_one(tmp_path: Path) -> None:
    """L5: the script's hand-over, prefill and decode in processes of their own, and its logits check; with no other
    library than it may need."""
    (tmp_path / "sitecustomize.py").write_text(BARE_MACHINE)
    command = [sys.executable, "-m", "bench.gpu.spine", "--json", "--device", "cpu", "--quick"]
    done = subprocess.run(
        [*command, "--checks", "v3_logits,handover_v3,captured"],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "UCX_NET_DEVICES": "lo",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", "")))),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert list(report["checks"]) == ["v3_logits", "captured", "handover_v3"]
    figures = report["checks"]["handover_v3"]["figures"]
    assert figures["one_by_one"]["equal_choices"] == figures["one_by_one"]["choices"] == 5
    assert figures["together"]["equal_choices"] == figures["together"]["choices"] == 8
    assert figures["bytes_sent"] > 0


def completion(tokens: list[int], margin: float | None = None) -> Completion:
    top = () if margin is None else ((1, 0.0), (2, -margin))
    logprobs = [TokenLogprob(token, 0.0, top) for token in tokens]
    return Completion(request("r", (1, 2), 4), [ChoiceResult(tokens, logprobs=logprobs)])


@pytest.mark.parametrize(
    ("got", "margin", "wrong", "narrow"),
    [
        ([5, 6, 7], 0.5, 0, 0),
        ([5, 6, 8], 0.5, 1, 0),
        ([5, 6, 8], 1e-5, 0, 1),
        ([5, 6], 1e-5, 1, 0),
        ([5, 6], None, 1, 0),
        ([], 1e-5, 1, 0),
    ],
)
def test_a_difference_is_excused_only_where_the_choice_was_narrow(
    got: list[int], margin: float | None, wrong: int, narrow: int
) -> None:
    check = compare_tokens([completion([5, 6, 7], margin)], [completion(got, margin)])
    assert (len(check.wrong), len(check.narrow)) == (wrong, narrow)
    assert check.ok is (wrong == 0)


def test_nothing_compared_is_not_ok() -> None:
    assert not compare_tokens([], []).ok


@pytest.mark.parametrize(("right", "place"), [([1, 2, 3], None), ([1, 4, 3], 1), ([1], 1), ([1, 2, 3, 4], 3)])
def test_first_difference(right: list[int], place: int | None) -> None:
    assert first_difference([1, 2, 3], right) == place


def test_logits_that_are_not_numbers_are_infinitely_wrong() -> None:
    reference = torch.tensor([[1.0, -2.0], [0.5, 4.0]])
    good = compare_logits(reference, reference + 2e-6)
    assert good.same_best == good.rows == 2
    assert 0 < good.max_error < 1e-5
    assert compare_logits(reference, torch.full_like(reference, float("nan"))).max_error == float("inf")
