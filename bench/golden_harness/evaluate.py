"""Run cases and judge them: passed, failed with a reason, or informational."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bench.golden_harness import tolerance as forms
from bench.golden_harness.case import Case, GoldenFormatError, Tensors
from bench.golden_harness.registry import Runner

NOT_GATED_FAMILIES = {"dspark": "draft layers (spec §15) are not part of the engine yet"}
NOT_GATED_CASES = {
    "sampling/verify": "verification of drafts (spec §16) is not part of the engine yet",
    "sampling/uniform_accept": "verification of drafts (spec §16) is not part of the engine yet",
}
NOT_GATED_OUTPUTS = ("draft_",)
"""Beginnings of output names that no case is judged by."""

_BOUNDS = frozenset({"must", "may", "count", "must_cand", "may_cand", "count_cand"})
"""Limits of a selection, not results: judged only when a runner returns them."""


@dataclass
class Verdict:
    """Outcome of a set of cases."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Case → every output that failed, and how."""
    informational: list[str] = field(default_factory=list)
    """Cases without a gating output."""

    @property
    def cases(self) -> int:
        return len(self.passed) + len(self.failed) + len(self.informational)


def gating_outputs(case: Case) -> list[str]:
    """Outputs by which a case is judged."""
    if case.family in NOT_GATED_FAMILIES or case.name in NOT_GATED_CASES:
        return []
    return [
        name
        for name, entry in case.outputs.items()
        if entry.tolerance not in (None, "informational") and not name.startswith(NOT_GATED_OUTPUTS)
    ]


def evaluate(cases: Iterable[Case], runners: Mapping[str, Runner]) -> Verdict:
    verdict = Verdict()
    for case in cases:
        gating = gating_outputs(case)
        if not gating:
            verdict.informational.append(case.name)
            continue
        reasons = judge(case, gating, runners.get(case.family))
        if reasons:
            verdict.failed[case.name] = "; ".join(reasons)
        else:
            verdict.passed.append(case.name)
    return verdict


def judge(case: Case, gating: list[str], run: Runner | None) -> list[str]:
    """Why the case fails, output by output; empty when it passes."""
    if run is None:
        return [f"no runner for family {case.family!r}"]
    try:
        got = run(case)
    except Exception as error:  # noqa: BLE001 - the subject under test may raise anything; it is the case's result
        return [f"raised {type(error).__name__}: {error}"]
    ref = {name: case.expected(name) for name in case.outputs}
    reasons = []
    for name in gating:
        reason = _judge_output(case, name, got, ref)
        if reason is not None:
            reasons.append(f"{name}: {reason}")
    return reasons


def _judge_output(case: Case, name: str, got: Tensors, ref: Tensors) -> str | None:
    entry = case.outputs[name]
    rule = entry.tolerance
    own = name if name in got else name.removeprefix("neg.") if rule == "must_differ" else name
    if own not in got:
        return None if name in _BOUNDS else "not computed"
    if rule == "with_indices":
        covered = any(other.tolerance == f"row_order_free({name})" for other in case.outputs.values())
        return None if covered else "no index output names these weights"
    if rule is None:
        raise GoldenFormatError(f"output {name} of {case.name} has no tolerance")
    if isinstance(rule, str) and (form := forms.related(rule)) is not None:
        return forms.check_related(*form, name, got, ref, case.integer("offset", 0))
    reason = forms.check(rule, got[own], ref[name])
    if reason is None and name == "recommended" and _BOUNDS & ref.keys() >= {"must", "may", "count"}:
        return forms.topk_set(got[own], ref["must"], ref["may"], ref["count"])
    return reason
