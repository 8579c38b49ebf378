"""Compare the engine with golden vectors: every case of a folder, judged by the folder's own tolerances.

``cases`` = ``passed`` + failed + informational. ``failed`` maps a case to what went wrong; ``informational`` lists
cases without a gating output; ``not_gated`` says why families and cases are left out of the judgement. The exit
status is 1 when a case failed. ``bench/golden_harness`` describes the format and how a family gets its runner.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path

import torch

from bench._report import JsonValue, Report, Scalar, arguments, emit
from bench.golden_harness.case import Case, load_cases
from bench.golden_harness.evaluate import NOT_GATED_CASES, NOT_GATED_FAMILIES, Verdict, evaluate
from bench.golden_harness.folder import golden_folder
from bench.golden_harness.registry import runners


def report(verdict: Verdict, cases: list[Case]) -> Report:
    names = {case.name for case in cases}
    families = {case.family for case in cases}
    not_gated: dict[str, JsonValue] = {f"{f}/*": why for f, why in NOT_GATED_FAMILIES.items() if f in families}
    not_gated |= {name: why for name, why in NOT_GATED_CASES.items() if name in names}
    table: list[dict[str, Scalar]] = []
    for family in dict.fromkeys(case.family for case in cases):
        counts = [
            sum(name.startswith(f"{family}/") for name in group)
            for group in (verdict.passed, verdict.failed, verdict.informational)
        ]
        table.append({"family": family, "passed": counts[0], "failed": counts[1], "informational": counts[2]})
    return Report(
        name="golden",
        results={
            "cases": verdict.cases,
            "passed": len(verdict.passed),
            "failed": dict(verdict.failed),
            "informational": list(verdict.informational),
            "not_gated": not_gated,
        },
        table=table,
        notes=[f"FAILED {name}: {why}" for name, why in verdict.failed.items()],
    )


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--dir", type=Path, default=golden_folder(), help="folder with manifest.json")
    parser.add_argument("--case", default="*", help="only cases whose name matches this pattern, e.g. 'moe/*'")
    options = parser.parse_args(argv)
    torch.set_grad_enabled(False)
    cases = [case for case in load_cases(options.dir) if fnmatch(case.name, options.case)]
    verdict = evaluate(cases, runners())
    emit(report(verdict, cases), as_json=options.json)
    return 1 if verdict.failed or not verdict.cases else 0


if __name__ == "__main__":
    sys.exit(main())
