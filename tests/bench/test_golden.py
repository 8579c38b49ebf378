"""The engine against the golden vectors, and the harness against a wrong engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from bench import golden
from bench.golden_harness.case import Case, GoldenFormatError, Tensors, load_cases
from bench.golden_harness.evaluate import evaluate, gating_outputs
from bench.golden_harness.folder import SLICE, golden_folder
from bench.golden_harness.registry import runners
from headrace.kernels.reference import quant

FOLDER = golden_folder()
CASES = load_cases(FOLDER)
FAMILIES = sorted({case.family for case in CASES if gating_outputs(case)})


def of_family(family: str) -> list[Case]:
    return [case for case in CASES if case.family == family]


@pytest.mark.parametrize("family", FAMILIES)
def test_golden(family: str) -> None:
    with torch.no_grad():
        verdict = evaluate(of_family(family), runners())
    assert not verdict.failed
    assert verdict.passed


def test_the_slice_holds_every_judged_case() -> None:
    """A bare clone judges what the whole set judges, within 8 MB."""
    held = load_cases(SLICE)
    assert sum(path.stat().st_size for path in SLICE.rglob("*") if path.is_file()) <= 8_000_000
    assert {case.name for case in held} == {case.name for case in CASES if gating_outputs(case)}
    for case in held:
        for entry in (*case.inputs.values(), *case.weights.values(), *case.outputs.values()):
            stored = case.files.read_stored(entry)
            assert tuple(stored.shape) == entry.shape
            assert str(stored.dtype) == f"torch.{entry.dtype}"


def test_a_wrong_rounding_rule_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: ties of e2m1 away from zero instead of to the even code."""

    def wrong_codes(x: torch.Tensor) -> torch.Tensor:
        code = sum((x.abs() >= bound).to(torch.uint8) for bound in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
        return torch.as_tensor(code, dtype=torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)

    monkeypatch.setattr(quant, "e2m1_codes", wrong_codes)
    failed = evaluate(of_family("quant"), runners()).failed
    assert "quant/e2m1_rounding" in failed
    assert "quant/fp4_index_b32_edges" in failed
    assert "quant/e4m3_b32_fp32" not in failed


@pytest.mark.parametrize("family", ["linear", "mhc", "moe", "rope"])
def test_a_result_off_by_a_tenth_fails(family: str) -> None:
    """Negative control: every case notices when its float outputs are scaled."""
    run = runners()[family]

    def scaled(case: Case) -> Tensors:
        return {name: t * 1.1 if t.is_floating_point() else t for name, t in run(case).items()}

    verdict = evaluate(of_family(family), {family: scaled})
    assert not verdict.passed


def test_the_wrong_hyper_connection_schedule_fails() -> None:
    """Negative control: the stored wrong result is refused (must_differ)."""

    def immediate(case: Case) -> Tensors:
        right = dict(runners()["mhc"](case))
        if "neg.attn_input" in case.outputs:
            right["attn_input"] = case.expected("neg.attn_input")
        return right

    failed = evaluate(of_family("mhc"), {"mhc": immediate}).failed
    assert "equals the known wrong result" in failed["mhc/block_0"]


def test_nothing_goes_missing_silently() -> None:
    def nothing(case: Case) -> Tensors:
        return {}

    def raising(case: Case) -> Tensors:
        raise RuntimeError("broken")

    cases = of_family("rope")
    assert set(evaluate(cases, {}).failed.values()) == {"no runner for family 'rope'"}
    assert all("not computed" in why for why in evaluate(cases, {"rope": nothing}).failed.values())
    assert set(evaluate(cases, {"rope": raising}).failed.values()) == {"raised RuntimeError: broken"}


def test_a_case_without_gating_output_is_informational(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not passed, and not a reason to fail."""
    manifest = json.loads((SLICE / "manifest.json").read_text())
    raw = next(case for case in manifest["cases"] if case["case"].startswith("rope/"))
    for entry in raw["outputs"].values():
        entry["tol"] = "informational"
    judged = next(case for case in manifest["cases"] if case["case"].startswith("quant/"))
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "cases": [raw, judged]}))
    for name in ("rope", "quant"):
        shutil.copy(SLICE / f"{name}.safetensors", tmp_path)
    assert golden.main(["--dir", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["cases"], printed["passed"], printed["failed"]) == (2, 1, {})
    assert printed["informational"] == [raw["case"]]


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GoldenFormatError, match="no manifest"):
        load_cases(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 2}')
    with pytest.raises(GoldenFormatError, match="reads format 1"):
        load_cases(tmp_path)
