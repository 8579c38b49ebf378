"""Replay R of a trace: how much of the cache a routing policy finds, and how evenly it spreads the work.

    python -m bench.routing --trace FILE --json

Rows in trace order over some workers, each with an LRU of blocks: once without a limit and once of 5,000 blocks. No
time, no store, no feedback (spec/balancers.md). Our policy and the index are the very objects of the router service;
beside them run the controls that the bars are meant to catch. Exit status 1 when `headrace` misses a bar, or when a
control passes what it should fail.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from bench._progress import Phases
from bench._report import JsonValue, Report, Scalar, arguments, emit, existing, positive
from bench.routing_harness.plain import PlainIndex
from bench.routing_harness.policies import OURS, POLICIES
from bench.routing_harness.replay import MakeIndex, Outcome, ceiling, keys_of, replay
from headrace.router.index.index import BlockIndex
from headrace.router.simulate.traces import Trace, TraceError, read_trace

CAPACITIES: Mapping[str, int | None] = {"infinite": None, "cap5000": 5000}
INDEX_BYTES = 256 * 1024 * 1024
"""More than the trace needs: nothing is forgotten."""
INDEXES: Mapping[str, MakeIndex] = {
    "block": lambda workers: BlockIndex(INDEX_BYTES),
    "plain": lambda workers: PlainIndex(workers),
}
ANCHORS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "round_robin": {"infinite": (0.1363, 1.044, 1.45, 1.85), "cap5000": (0.1066,)},
    "deepest_match": {"infinite": (0.3664, 8.00), "cap5000": (0.1118, 8.00)},
    "lambda_0.05": {"infinite": (0.3637, 1.006, 1.21, 1.51), "cap5000": (0.3483,)},
    "lambda_0.02": {"infinite": (0.3658, 1.005, 1.23, 1.50), "cap5000": (0.3507,)},
    "lambda_0.005": {"infinite": (0.3664, 1.005, 1.20, 1.42), "cap5000": (0.3516, 1.005, 1.23, 1.46)},
    "lambda_0.0002": {"infinite": (0.3664, 1.006, 2.32, 7.18), "cap5000": (0.3461, 1.006, 2.36, 7.03)},
}
"""hits, imbalance, imbalance_60s mean and p95 that the spec gives for the conversation trace over 8 workers."""
CONVERSATION_ACCESSES = 288_500
"""By which that trace is known."""


@dataclass(frozen=True)
class Bars:
    """What `headrace` must reach on the conversation trace; hits on other traces have other ceilings."""

    infinite_hits: float = 0.365
    cap5000_hits: float = 0.350
    imbalance: float = 1.02
    imbalance_60s_mean: float = 1.26
    imbalance_60s_p95: float = 1.55

    def missed(self, outcomes: Mapping[str, Outcome]) -> list[str]:
        """Names of the bars that one policy misses, by capacity."""
        missed = []
        for name, outcome in outcomes.items():
            least = self.infinite_hits if name == "infinite" else self.cap5000_hits
            over = [
                outcome.hit_ratio < least,
                outcome.imbalance > self.imbalance,
                outcome.imbalance_60s_mean > self.imbalance_60s_mean,
                outcome.imbalance_60s_p95 > self.imbalance_60s_p95,
            ]
            fields = ("hit_ratio", "imbalance", "imbalance_60s_mean", "imbalance_60s_p95")
            missed += [f"{name}.{field}" for field, is_over in zip(fields, over, strict=True) if is_over]
        return missed


CONTROLS: Mapping[str, str] = {
    "round_robin": "infinite.hit_ratio",
    "deepest_match": "infinite.imbalance",
    "lambda_0.0002": "infinite.imbalance_60s_mean",
}
"""A bar that each control must miss, else the bar measures nothing."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--trace", type=existing, required=True, help="a trace with block ids (Mooncake or V4-Flash format)"
    )
    parser.add_argument("--workers", type=positive, default=8)
    parser.add_argument("--rows", type=positive, help="only the first rows of the trace")
    parser.add_argument("--policy", action="append", choices=sorted(POLICIES), help="only these; may be repeated")
    parser.add_argument("--index", choices=sorted(INDEXES), default="block", help="of headrace; others: brute force")
    parser.add_argument("--infinite-hits", type=float, default=Bars.infinite_hits, help="bar of hit_ratio, any number")
    parser.add_argument("--cap5000-hits", type=float, default=Bars.cap5000_hits, help="bar of hit_ratio, 5,000 blocks")
    options = parser.parse_args(argv)
    try:
        trace = read_trace(options.trace)
    except TraceError as error:
        parser.error(str(error))
    if not trace.block_tokens:
        parser.error(f"{options.trace} has no block ids: nothing is shared in it")
    trace = Trace(trace.format, [row for row in trace.rows[: options.rows] if row.blocks])
    names = options.policy or list(POLICIES)
    outcomes = measure(trace, options.workers, names, INDEXES[options.index])
    bars = Bars(options.infinite_hits, options.cap5000_hits)
    report = build_report(options.trace.name, trace, options.workers, outcomes, bars)
    emit(report, as_json=options.json)
    if not report.results["bars_met"]:
        sys.exit(1)


def measure(trace: Trace, workers: int, names: Sequence[str], make_index: MakeIndex) -> dict[str, dict[str, Outcome]]:
    """Every policy at every capacity; progress on stderr."""
    keys = keys_of(trace)
    found: dict[str, dict[str, Outcome]] = {}
    with Phases() as phases:
        for name in names:
            found[name] = {}
            for label, capacity in CAPACITIES.items():
                with phases.phase(f"{name}, {label}", len(keys)) as advance:
                    # Controls ask the faster of the two indexes, which tells the same (tests/bench/test_routing.py).
                    index = make_index if name == "headrace" else INDEXES["plain"]
                    found[name][label] = replay(trace, keys, workers, capacity, POLICIES[name], index, advance)
    return found


def build_report(
    name: str, trace: Trace, workers: int, outcomes: Mapping[str, Mapping[str, Outcome]], bars: Bars
) -> Report:
    """The figures, the anchors beside them where the trace is the conversation, and what was missed."""
    ours = outcomes.get("headrace")
    missed = bars.missed(ours) if ours is not None else []
    blind = [
        f"{control} does not miss {bar}"
        for control, bar in CONTROLS.items()
        if control in outcomes and bar not in bars.missed(outcomes[control])
    ]
    results: dict[str, JsonValue] = {
        "trace": name,
        "workers": workers,
        "requests": len(trace.rows),
        "accesses": trace.accesses,
        "lambda": OURS.weight,
        "attention_share": OURS.attention_share,
        "ceiling": {"infinite": ceiling(trace), "cap5000": ceiling(trace, 5000 * workers)},
        "policies": {
            policy: {label: _fields(outcome) for label, outcome in by_capacity.items()}
            for policy, by_capacity in outcomes.items()
        },
        "bars": _fields(bars),
        "missed": missed,
        "blind": blind,
        "bars_met": not missed and not blind,
    }
    notes = [f"Bars missed by headrace: {', '.join(missed)}." if missed else "headrace meets every bar."]
    notes += [f"A control passes: {reason}." for reason in blind]
    if trace.accesses == CONVERSATION_ACCESSES and workers == 8:
        distance = anchors_distance(outcomes)
        results["anchors"] = {
            policy: {label: list(values) for label, values in at.items()} for policy, at in ANCHORS.items()
        }
        results["anchors_largest_hit_difference"] = distance
        notes.append(f"Hit ratios differ from the spec's anchors by {distance:.4f} at most.")
    rows = [_row(policy, label, outcome) for policy, at in outcomes.items() for label, outcome in at.items()]
    return Report("routing", results, rows, notes)


def anchors_distance(outcomes: Mapping[str, Mapping[str, Outcome]]) -> float:
    """Largest difference of a hit ratio from the spec's."""
    differences = [
        abs(outcomes[policy][label].hit_ratio - values[0])
        for policy, at in ANCHORS.items()
        if policy in outcomes
        for label, values in at.items()
    ]
    return max(differences, default=0.0)


def _fields(of: Outcome | Bars) -> dict[str, JsonValue]:
    return {name: round(value, 5) for name, value in asdict(of).items()}


def _row(policy: str, label: str, outcome: Outcome) -> dict[str, Scalar]:
    anchor = ANCHORS.get(policy, {}).get(label, ())
    return {
        "policy": policy,
        "cache": label,
        "hits": round(outcome.hit_ratio, 4),
        "imbalance": round(outcome.imbalance, 3),
        "60 s mean": round(outcome.imbalance_60s_mean, 3),
        "60 s p95": round(outcome.imbalance_60s_p95, 3),
        "attention": round(outcome.attention_imbalance, 3),
        "busiest": round(outcome.busiest_share, 3),
        "spec": " / ".join(f"{value:g}" for value in anchor),
    }


if __name__ == "__main__":
    main()
