"""The bars of a soak, and what is printed of it."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.checker import Outcome
from tests.chaos.clients import Trace
from tests.chaos.faults import Done
from tests.chaos.leaks import Footprint
from tests.chaos.round import Found
from tests.chaos.schedule import Kind

OLD_S = 180.0
WARM_S = 75.0
"""Age at which a process under load counts as warm."""
MOST_GROWTH = 1.05
SHOWN = 40


@dataclass(frozen=True)
class Bars:
    """Least numbers of a long soak; a short one has none."""

    faults: int = 0
    kills: int = 0
    kills_of_each: int = 0
    finished: int = 0
    in_flight: int = 0


LONG_BARS = Bars(faults=100, kills=40, kills_of_each=3, finished=500, in_flight=100)


def conclude(seed: int, rounds: Sequence[Found], bars: Bars) -> dict[str, Any]:
    """One object: the numbers of issue 5, details, and `missed`: which bars were missed, in words."""
    counts: Counter[str] = Counter()
    for found in rounds:
        counts.update(found.books.counts)
    done = [each for found in rounds for each in found.done]
    traces = [trace for found in rounds for trace in found.traces]
    kills = Counter(kind_of(each) for each in done if each.fault.kind is Kind.KILL)
    leaks = [f"{found.family}: {text}" for found in rounds for text in found.leaks]
    growth = {f"{found.family} {name}": ratio for found in rounds for name, ratio in grown(found).items()}
    leaks += [f"{found.family}: {text}" for found in rounds for text in descriptors(found)]
    problems = [f"{found.family}: {text}" for found in rounds for text in (*found.problems, *found.books.problems())]
    problems = [text[:600] for text in problems]
    wrong = [trace for trace in traces if trace.watch.wrong]
    errors = [trace for trace in traces if trace.watch.event_errors]
    failed = [trace for trace in traces if trace.outcome is Outcome.FAILED]
    pauses = sorted(pause for found in rounds for pause in after_decode_death(found))
    result: dict[str, Any] = {
        "accepted": counts["accepted"],
        "finished": counts["finished"],
        "cancelled": counts["cancelled"],
        "deadline": counts["deadline"],
        "failed": counts["failed"],
        "refused": counts["refused"],
        "wrong_tokens": len(wrong),
        "event_errors": len(errors),
        "leaks": len(leaks),
        "faults": len(done),
        "faults_in_flight": sum(each.in_flight for each in done),
        "kills": sum(kills.values()),
        "seed": seed,
        "faults_by_kind": dict(Counter(name_of(each) for each in done)),
        "kills_by_process": dict(kills),
        "faults_by_process": dict(Counter(kind_of(each) for each in done)),
        "faults_left_out": {
            f"{found.family}: {why}": number for found in rounds for why, number in found.left_out.items()
        },
        "starts_repeated": sum(found.starts_repeated for found in rounds),
        "streams_lost": dict(sum((Counter(found.breaks) for found in rounds), Counter())),
        "next_token_after_decode_death_s": percentiles(pauses),
        "rss_growth": growth,
        "failures": [f"{trace.ask.name} ({trace.ask.manner}): {trace.reason}" for trace in failed][:SHOWN],
        "wrong": [f"{trace.ask.name}: {trace.watch.wrong[0]}" for trace in wrong][:SHOWN],
        "wrong_events": [f"{trace.ask.name}: {trace.watch.event_errors[:3]}" for trace in errors][:SHOWN],
        "leaked": leaks[:SHOWN],
        "problems": problems[:SHOWN],
        "at_routers": {
            f"{found.family} {name}": dict(ended) for found in rounds for name, ended in found.at_routers.items()
        },
    }
    result["missed"] = missed(result, bars, [kind for found in rounds for kind in found_kinds(found)])
    return result


def missed(result: dict[str, Any], bars: Bars, kinds: Iterable[str]) -> list[str]:
    """Which bars were missed. `kinds`: of processes that ran."""
    found = [
        f"{name}: {result[name]}, not 0" for name in ("failed", "wrong_tokens", "event_errors", "leaks") if result[name]
    ]
    ended = sum(result[name] for name in ("finished", "cancelled", "deadline", "failed"))
    if result["accepted"] != ended:
        found.append(f"accepted {result['accepted']}, ended {ended}")
    found += [f"problem: {text}" for text in result["problems"]]
    found += [f"{name} failed {ends['failed']}" for name, ends in result["at_routers"].items() if ends.get("failed")]
    wanted = {
        "faults": bars.faults,
        "kills": bars.kills,
        "finished": bars.finished,
        "faults_in_flight": bars.in_flight,
    }
    found += [f"{name}: {result[name]} of {least}" for name, least in wanted.items() if result[name] < least]
    for kind in sorted(set(kinds)):
        killed = result["kills_by_process"].get(kind, 0)
        if killed < bars.kills_of_each:
            found.append(f"kills of {kind}: {killed} of {bars.kills_of_each}")
    found += [f"RSS of {name} grew by {ratio}" for name, ratio in result["rss_growth"].items() if ratio > MOST_GROWTH]
    return found


def kind_of(done: Done) -> str:
    """Kind of process that a fault hit."""
    return done.fault.target.rpartition("-")[0] or done.fault.target


def name_of(done: Done) -> str:
    fault = done.fault
    return f"{fault.kind.value} {fault.spoil.value}" if fault.kind is Kind.WIRE else fault.kind.value


def found_kinds(found: Found) -> set[str]:
    """Kinds of processes that ran in a round."""
    return {name.rpartition("-")[0] for name in found.footprints} | {"redis", "etcd"}


def warm_and_last(prints: Sequence[Footprint]) -> tuple[Footprint, Footprint] | None:
    """A process's footprint when it was warm, and its last; None for one that is not old enough."""
    if not prints or prints[-1].at - prints[0].at < OLD_S:
        return None
    warm = next(each for each in prints if each.at - prints[0].at >= WARM_S)
    return warm, prints[-1]


def grown(found: Found) -> dict[str, float]:
    """Process → its resident memory at the end in parts of that when it was warm."""
    pairs = {name: warm_and_last(prints) for name, prints in found.footprints.items()}
    return {name: round(pair[1].rss_kib / pair[0].rss_kib, 3) for name, pair in pairs.items() if pair is not None}


def descriptors(found: Found) -> list[str]:
    """Descriptors that old processes have more of than when they were warm: sockets come with peers, and go."""
    texts = []
    for name, prints in found.footprints.items():
        pair = warm_and_last(prints)
        if pair is not None and pair[1].descriptors > pair[0].descriptors + 8:
            texts.append(f"{name}: descriptors {pair[0].kinds} → {pair[1].kinds}")
    return texts


def after_decode_death(found: Found) -> list[float]:
    """Seconds to the next token of every request that was at a decode when it was killed: the longest wait between
    two of its tokens from the kill on, the first counted from the kill."""
    pauses = []
    for done in found.done:
        if done.fault.kind is not Kind.KILL or kind_of(done) != "decode":
            continue
        for trace in found.traces:
            if trace.opened < done.at < trace.closed and _was_there(trace, done.incarnation):
                later = [done.at, *(at for at in trace.arrivals if at >= done.at)]
                if len(later) > 1 and trace.arrivals[0] < done.at:
                    pauses.append(max(b - a for a, b in itertools.pairwise(later)))
    return pauses


def _was_there(trace: Trace, incarnation: str) -> bool:
    report = trace.watch.report
    if report is None:
        return False
    attempts = {each.attempt for each in report.replicas if each.peer.incarnation == incarnation}
    return bool(attempts) and max(each.attempt for each in report.replicas) > min(attempts)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Number, p50 and p99."""
    if len(values) < 2:
        return {"count": len(values), **({"p50": values[0], "p99": values[0]} if values else {})}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"count": len(values), "p50": round(cuts[49], 3), "p99": round(cuts[98], 3)}
