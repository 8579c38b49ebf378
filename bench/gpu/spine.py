"""The spine on a GPU: models, engine, hand-over and rows on CUDA beside the same on the CPU.

    python3 -m bench.gpu.spine --json                          # one GPU: both processes of the hand-over share it
    python3 -m bench.gpu.spine --json --gpus 2                 # prefill on GPU 0, decode on GPU 1
    python3 -m bench.gpu.spine --json --device cpu --quick     # the same checks without a GPU, small

Needs torch, numpy, safetensors, xxhash and the NIXL wheel, nothing else of Headrace's requirements. ``checks`` maps a
check to ``ok`` and its figures; ``ok`` is their conjunction and the exit status. Times are reported, never judged.
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from fnmatch import fnmatch
from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch

from bench._report import JsonValue, Report, Scalar, arguments, emit
from bench.golden_harness.folder import golden_folder
from bench.gpu.captured import check_captured
from bench.gpu.card import card
from bench.gpu.handover import check_handover
from bench.gpu.numerics import check_model, golden_cases
from bench.gpu.serving import check_engine
from bench.gpu.tier import check_tier
from bench.gpu.tiny import make_v3, make_v41
from headrace.engine.loading import ModelSettings

ROUNDING = {"noquant": 2e-5, "kvquant": 2e-5, "v3": 2e-5, "bf16": 0.05}
"""Median over rows of max|Δlogit| ÷ max|logit| that rounding alone explains. Single rows of V4.1 may lie above: one
score that rounds the other way chooses another entry or expert. In the full mode random weights make that the rule, and
its verdict is the golden set's, layer by layer."""


@dataclass(frozen=True)
class Setup:
    """What this run runs on."""

    device: str
    """``cuda:0`` or ``cpu``."""
    pair: tuple[str, str]
    """Devices of prefill and decode."""
    quick: bool
    models: Path

    @property
    def v3(self) -> Path:
        return self.models / "v3"

    @property
    def v41(self) -> Path:
        return self.models / "v41"

    @property
    def length(self) -> int:
        """Of the longest prompts: several chunks and blocks."""
        return 70 if self.quick else 700

    @property
    def tokens(self) -> int:
        return 6 if self.quick else 48


Check = Callable[[Setup], tuple[bool, object]]


def v41_logits(setup: Setup) -> tuple[bool, object]:
    """V4.1-tiny in every numeric mode against the same on the CPU."""
    found: dict[str, object] = {}
    good = True
    for mode in ("noquant", "kvquant", "full"):
        result = check_model(setup.v41, setup.device, length=setup.length // 2, chunk=37, mode=cast("Any", mode))
        found[mode] = result
        if mode in ROUNDING:
            good &= result.median_error < ROUNDING[mode] and result.same_best >= 0.9 * result.rows
        else:
            good &= isfinite(result.max_error)
    return good, found


def v3_logits(setup: Setup) -> tuple[bool, object]:
    """Random DeepSeek-V3, absorbed and naive, float32 and bf16, against float32 on the CPU."""
    plain = ModelSettings(dtype="float32", native_kernels=False)
    found: dict[str, object] = {}
    good = True
    for attention in ("absorbed", "naive"):
        for dtype, limit in (("float32", "v3"), ("bfloat16", "bf16")):
            result = check_model(
                setup.v3,
                setup.device,
                length=setup.length // 2,
                chunk=37,
                dtype=cast("Any", dtype),
                attention=cast("Any", attention),
                reference=plain,
            )
            found[f"{attention} {dtype}"] = result
            good &= result.median_error < ROUNDING[limit]
    return good, found


def golden(setup: Setup) -> tuple[bool, object]:
    """The golden set's cases that run a checkpoint, by their own tolerances."""
    found = golden_cases(golden_folder(), setup.device)
    return all(set(result) == {"passed"} and result["passed"] for result in found.values()), found


def engine_v3(setup: Setup) -> tuple[bool, object]:
    runs = check_engine(setup.v3, setup.device, longest=setup.length, tokens=max(setup.tokens, 24))
    return all(run.ok for run in runs), runs


def engine_v41(setup: Setup) -> tuple[bool, object]:
    runs = check_engine(setup.v41, setup.device, longest=setup.length, tokens=max(setup.tokens, 24))
    return all(run.ok for run in runs), runs


def tier_v3(setup: Setup) -> tuple[bool, object]:
    """Prefixes that outlive their pool: host memory and disk."""
    runs = check_tier(setup.v3, setup.device, longest=setup.length, tokens=setup.tokens)
    return all(run.ok for run in runs), runs


def tier_v41(setup: Setup) -> tuple[bool, object]:
    """The same with snapshots."""
    runs = check_tier(setup.v41, setup.device, longest=setup.length, tokens=setup.tokens)
    return all(run.ok for run in runs), runs


def handover_v3(setup: Setup) -> tuple[bool, object]:
    return _handover(setup, setup.v3)


def handover_v41(setup: Setup) -> tuple[bool, object]:
    return _handover(setup, setup.v41)


def _handover(setup: Setup, folder: Path) -> tuple[bool, object]:
    exact = setup.device == "cpu"
    result = check_handover(folder, setup.pair, longest=setup.length, tokens=setup.tokens, exact=exact)
    return result.ok, result


def captured(setup: Setup) -> tuple[bool, object]:
    """Decode steps as graphs: equal bytes, no host wait, times."""
    if setup.device == "cpu":
        return True, "there is no GPU to capture on"
    found: dict[str, object] = {}
    good = True
    for sequences, context in ((1, 500), (8, 500), (32, 1000)):
        for name, folder, options in (
            ("v3 float32", setup.v3, {"dtype": "float32"}),
            ("v3 bfloat16", setup.v3, {"dtype": "bfloat16"}),
            ("v41 noquant", setup.v41, {}),
            ("v41 full", setup.v41, {"mode": "full"}),
        ):
            result = check_captured(folder, setup.device, sequences=sequences, context=context, **cast("Any", options))
            found[f"{name}, {sequences} × {context}"] = result
            good &= result.ok
    return good, found


def rows(setup: Setup) -> tuple[bool, object]:
    """Rows from GPU to GPU, gathered and row by row, beside a plain copy of as many bytes."""
    if setup.device == "cpu":
        return True, "python -m bench.transfer measures this between CPU processes"
    from bench.gpu.row_kernels import measure_kernels
    from bench.gpu.rows import measure

    first, second = (torch.device(device).index or 0 for device in setup.pair)
    kernels = measure_kernels(first)
    found = measure(first, second)
    return all(push.equal for push in found), {"pushes": found, "kernels": kernels}


CHECKS: dict[str, Check] = {
    "v41_logits": v41_logits,
    "v3_logits": v3_logits,
    "golden": golden,
    "engine_v3": engine_v3,
    "engine_v41": engine_v41,
    "tier_v3": tier_v3,
    "tier_v41": tier_v41,
    "captured": captured,
    "handover_v3": handover_v3,
    "handover_v41": handover_v41,
    "rows": rows,
}


def run(setup: Setup, wanted: str) -> dict[str, JsonValue]:
    """Every check whose name fits; one that raises is not ok and tells where."""
    results: dict[str, JsonValue] = {}
    for name, check in CHECKS.items():
        if not any(fnmatch(name, pattern) for pattern in wanted.split(",")):
            continue
        begun = time.perf_counter()
        try:
            good, figures = check(setup)
        except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
            traceback.print_exc()
            good, figures = False, f"{type(error).__name__}: {error}"
        seconds = round(time.perf_counter() - begun, 1)
        print(f"{name}: {'ok' if good else 'NOT OK'} in {seconds} s", file=sys.stderr, flush=True)
        results[name] = {"ok": good, "seconds": seconds, "figures": _plain(figures)}
    return results


def _plain(value: object) -> JsonValue:
    """Dataclasses become objects."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if value == value and abs(value) != float("inf") else str(value)
    return value if isinstance(value, str | int | bool | None) else str(value)


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="GPUs that the hand-over uses")
    parser.add_argument("--quick", action="store_true", help="shorter prompts, fewer tokens")
    parser.add_argument("--checks", default="*", help=f"names or patterns, by commas: {', '.join(CHECKS)}")
    options = parser.parse_args(argv)
    if options.device == "cuda" and torch.cuda.device_count() < options.gpus:
        parser.error(f"--gpus {options.gpus}: torch sees {torch.cuda.device_count()}; use --device cpu without a GPU")
    pair = ("cpu", "cpu") if options.device == "cpu" else ("cuda:0", f"cuda:{options.gpus - 1}")
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(pair[0], pair, options.quick, Path(folder))
        make_v3(setup.v3, seed=0)
        make_v41(setup.v41, seed=0)
        checks = run(setup, options.checks)
    good = bool(checks) and all(cast("dict[str, Any]", result)["ok"] for result in checks.values())
    table: list[dict[str, Scalar]] = [
        {"check": name, "ok": cast("Any", result)["ok"], "seconds": cast("Any", result)["seconds"]}
        for name, result in checks.items()
    ]
    results: dict[str, JsonValue] = {"ok": good, "devices": list(pair), "card": card(options.device), "checks": checks}
    emit(Report("gpu.spine", results, table=table), as_json=options.json)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
