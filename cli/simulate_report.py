"""What `headrace simulate` prints: one JSON document, tables of it, pictures of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from headrace.cli.simulate_search import Cell
from headrace.router.simulate import plots
from headrace.router.simulate.policies import OURS
from headrace.router.simulate.run import Outcome, Times
from headrace.router.simulate.score import MOST, STEP
from headrace.router.simulate.workload import TraceColumns

Document = dict[str, Any]
"""Plain values, as printed; docs/cli.md describes them."""


def scored(
    unit: str,
    trace: TraceColumns,
    found: Mapping[str, Mapping[str, Cell]],
    bars: Mapping[str, float],
    seeds: Sequence[int],
    times: Times,
) -> Document:
    """Scores by mode and policy."""
    scores: dict[str, dict[str, Any]] = {}
    offline: dict[str, Any] = {}
    problems: list[str] = []
    for mode, cells in found.items():
        scores[mode] = {}
        for policy, cell in cells.items():
            score, final = cell.score, cell.final
            assert score is not None
            scores[mode][policy] = {
                "score": score.load,
                "at_ceiling": score.steps >= MOST,
                "by_seed": {str(k): round(v * STEP, 2) for k, v in score.by_seed.items()},
            }
            if final is not None:
                scores[mode][policy] |= _outcome(final)
                offline.setdefault(mode, _bound(final))
            scores[mode][policy]["trials"] = [
                {"load": round(trial.steps * STEP, 2), "seed": trial.seed, "passed": trial.passed}
                for trial in score.trials
            ]
            problems += cell.problems
    reached = {mode: scores[mode][OURS]["score"] for mode in bars if mode in scores and OURS in scores[mode]}
    return {
        "command": "simulate",
        "unit": unit,
        "trace": _trace(trace),
        "seeds": list(seeds),
        "warmup_s": times.warmup_s,
        "measured_s": times.measured_s,
        "shared_store": any(cell.cluster.store is not None for cells in found.values() for cell in cells.values()),
        "offline": offline,
        "scores": scores,
        "bars": {mode: bars[mode] for mode in reached},
        "passed": all(reached[mode] >= bars[mode] for mode in reached) if reached else None,
        "problems": problems,
    }


def single(unit: str, mode: str, trace: TraceColumns, outcomes: Mapping[str, Outcome]) -> Document:
    """One run of each policy."""
    first = next(iter(outcomes.values()))
    return {
        "command": "simulate",
        "unit": unit,
        "mode": mode,
        "trace": _trace(trace),
        "offline": {mode: _bound(first)},
        "runs": {
            policy: _outcome(outcome)
            | {
                "passed": outcome.passed,
                "arrivals": outcome.arrivals,
                "ends": outcome.ends,
                "rejections": outcome.rejections,
                "failed_attempts": outcome.failed_attempts,
                "log": list(outcome.log),
                "backlog_s": list(outcome.measured.backlog_s),
                "shares": {name: list(values) for name, values in outcome.measured.shares.items()},
            }
            for policy, outcome in outcomes.items()
        },
        "problems": [f"{policy}: {text}" for policy, outcome in outcomes.items() for text in outcome.problems],
    }


def _trace(trace: TraceColumns) -> Document:
    return {
        "requests": len(trace),
        "without_output": trace.dropped,
        "requests_per_s": round(trace.rate, 3),
        "block_tokens": trace.block_tokens,
    }


def _bound(outcome: Outcome) -> Document:
    bound, measured_s = outcome.bound, outcome.bound.seconds / outcome.offered
    one, other = bound.prefill_s, bound.decode_s
    return {
        "requests_per_s": round(bound.rate, 2),
        "prefill_requests_per_s": round(bound.requests / one, 2) if one else None,
        "decode_requests_per_s": round(bound.requests / other, 2) if other else None,
        "batch_ms": round(bound.batch_s * 1000, 1),
        "requests_per_batch": round(bound.batch_requests, 2),
        "hit_ratio": round(bound.hit_ratio, 4),
        "requests_per_decode_rank": round(bound.balanced_requests, 1),
        "measured_s": round(measured_s, 1),
    }


def _outcome(outcome: Outcome) -> Document:
    measured = outcome.measured
    return {
        "offered": round(outcome.offered, 4),
        "copies": round(outcome.copies, 2),
        "requests": measured.requests,
        "ttft_s": _finite(asdict(measured.ttft)),
        "tpot_ms": None if measured.tpot is None else _finite({k: v * 1000 for k, v in asdict(measured.tpot).items()}),
        "hit_ratio": round(measured.hit_ratio, 4),
        "loaded_ratio": round(measured.loaded_ratio, 4),
        "missed": {
            "ttft": round(measured.missed_ttft, 5),
            "tpot": round(measured.missed_tpot, 5),
            "unserved": round(measured.unserved, 5),
        },
        "backlog_growth": round(measured.backlog_growth, 5),
        "max_over_mean": {name: _finite(asdict(spread)) for name, spread in measured.spreads.items()},
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no infinity: a time that never came is null."""
    return {name: round(value, 4) if value < float("inf") else None for name, value in values.items()}


def show(document: Document, console: Console) -> None:
    """Tables for people."""
    trace = document["trace"]
    dropped = f", {trace['without_output']:,} rows without output left out" if trace["without_output"] else ""
    console.print(f"{document['unit']} ranks, trace of {trace['requests']:,} requests{dropped}", highlight=False)
    for mode, offline in document["offline"].items():
        console.print(f"balanced offline, {mode}: {offline['requests_per_s']:,} requests/s", highlight=False)
    groups = document["scores"] if "scores" in document else {document["mode"]: document["runs"]}
    for mode, rows in groups.items():
        console.print(_table(mode, rows, document.get("bars", {}).get(mode)))
    for policy, row in document.get("runs", {}).items():
        for line in row["log"]:
            console.print(f"{policy}: {line}", highlight=False)
        ends = ", ".join(f"{count:,} {name}" for name, count in row["ends"].items() if count)
        console.print(f"{policy}: {row['arrivals']:,} arrived; {ends}", highlight=False)
    for path in document.get("plots", []):
        console.print(path, highlight=False)


def _table(mode: str, rows: Mapping[str, Any], bar: float | None) -> Table:
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.title = f"{mode}, at least {bar:.2f} wanted" if bar else mode
    names = ("policy", "score", "TTFT p50/p99 s", "TPOT p50/p99 ms", "hits", "tokens", "attn", "KV", "reqs")
    for name in names:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy, row in rows.items():
        load = f"{row.get('score', row.get('offered')):.2f}"
        load = f"≥ {load}" if row.get("at_ceiling") else load
        if "ttft_s" not in row:
            table.add_row(policy, load, *[""] * (len(names) - 2))
            continue
        spread = {name: f"{values['mean']:.2f}" for name, values in row["max_over_mean"].items()}
        table.add_row(
            policy,
            load,
            _pair(row["ttft_s"], 2),
            _pair(row["tpot_ms"], 1),
            f"{row['hit_ratio']:.1%}" if mode != "decode" else "",
            *(spread.get(name, "") for name in ("prefill_tokens", "attention", "decode_kv", "decode_requests")),
        )
    return table


def _pair(values: Mapping[str, float | None] | None, digits: int) -> str:
    if values is None:
        return ""
    return " / ".join("never" if values[name] is None else f"{values[name]:.{digits}f}" for name in ("p50", "p99"))


def draw(document: Document, folder: Path) -> list[Path]:
    """Pictures of a document; their paths."""
    if "scores" in document:
        values = {
            mode: {policy: row["score"] for policy, row in rows.items()} for mode, rows in document["scores"].items()
        }
        return [plots.scores(values, document["bars"], folder / "scores.png")]
    runs = document["runs"]
    made = []
    backlogs = {policy: row["backlog_s"] for policy, row in runs.items() if row["backlog_s"]}
    if backlogs:
        label = "waiting prefill work per rank, s"
        made.append(plots.lines(backlogs, "seconds after the warm-up", label, folder / "backlog.png"))
    ranks = {f"{policy}, {side}": work for policy, row in runs.items() for side, work in row["shares"].items()}
    if ranks:
        made.append(plots.shares(ranks, folder / "shares.png"))
    return made
