"""What counts as a violation, and the report. Pure: it judges what others saw."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.fuzz.methods import STANDARD
from tests.fuzz.send import LEFT, Outcome

DEFECTS: Final = frozenset({"UNKNOWN", "INTERNAL"})
"""Statuses that no message may bring about."""
RSS_RATIO: Final = 1.25
"""Of resident memory at the end to that when warm, beside RSS_SLACK_MIB: an allocator's arenas settle slowly."""
RSS_SLACK_MIB: Final = 48.0


def violation_of(outcome: Outcome) -> str:
    """Why an answer is none that a message may get; empty when it may."""
    if outcome.status in ("OK", LEFT):
        return ""
    if outcome.status == "HANGS":
        return "no answer"
    if outcome.status in DEFECTS or outcome.code == "ERROR_CODE_INTERNAL":
        return "a defect, told as one"
    if outcome.code:
        return ""
    if outcome.method.partition("/")[0] in STANDARD and outcome.status in ("NOT_FOUND", "INVALID_ARGUMENT"):
        return ""
    return "an error without its type"


@dataclass
class MethodCount:
    """Of one method at one port."""

    sent: int = 0
    parsed: int = 0
    reached: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)
    """Errors' texts without their numbers: how deep the messages went."""

    def row(self) -> dict[str, object]:
        return {
            "sent": self.sent,
            "parsed": self.parsed,
            "reached": self.reached,
            "seconds": round(self.seconds, 1),
            "statuses": dict(self.statuses.most_common()),
            "said": dict(self.said.most_common(8)),
        }


class Tally:
    """Counts outcomes and keeps what is wrong with them."""

    def __init__(self) -> None:
        self.counts: defaultdict[tuple[str, str], MethodCount] = defaultdict(MethodCount)
        self.violations: list[dict[str, object]] = []

    def add(self, outcome: Outcome) -> None:
        count = self.counts[outcome.port, outcome.method]
        count.sent += 1
        count.parsed += outcome.parses
        count.reached += outcome.reached
        count.seconds += outcome.seconds
        count.statuses[outcome.code.removeprefix("ERROR_CODE_") or outcome.status] += 1
        if outcome.details:
            count.said[re.sub(r"[0-9a-f]{16,}|\d+|'[^']*'", "#", outcome.details)[:90]] += 1
        if why := violation_of(outcome):
            self.violations.append({"why": why, **outcome.row()})

    @property
    def sent(self) -> int:
        return sum(count.sent for count in self.counts.values())

    @property
    def parsed(self) -> int:
        return sum(count.parsed for count in self.counts.values())

    @property
    def reached(self) -> int:
        return sum(count.reached for count in self.counts.values())

    def unmet(self) -> list[str]:
        """Methods that fewer than half of their messages reached, of those with enough to say so."""
        return [
            f"{port} {method}: {count.reached} of {count.sent} messages reached a handler"
            for (port, method), count in sorted(self.counts.items())
            if count.sent >= 20 and count.reached * 2 < count.sent
        ]

    def rows(self) -> dict[str, dict[str, object]]:
        return {f"{port} {method}": count.row() for (port, method), count in sorted(self.counts.items())}


def uncounted(tally: Tally, before: Mapping[str, Counter[str]], after: Mapping[str, Counter[str]]) -> list[str]:
    """Methods of which a process says that its handlers had fewer messages than the fuzzer claims: its word stands.
    The front door is the router's."""
    claimed: Counter[tuple[str, str]] = Counter()
    for (port, method), count in tally.counts.items():
        claimed["router-0" if port == "front" else port, method] += count.reached
    wrong = []
    for (process, method), number in sorted(claimed.items()):
        name = _full(method)
        told = after[process][name] - before[process][name]
        if told < number:
            wrong.append(f"{process} counted {told} messages of {method}, the fuzzer {number}")
    return wrong


def _full(method: str) -> str:
    """As the counters name it: headrace.v1 left out."""
    return {"Health": f"grpc.health.v1.{method}", "ServerReflection": f"grpc.reflection.v1alpha.{method}"}.get(
        method.partition("/")[0], method
    )


def grown(memory: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Processes whose memory is not level."""
    return [
        f"{name} grew from {one['rss_warm_mib']} to {one['rss_end_mib']} MiB"
        for name, one in memory.items()
        if one["rss_end_mib"] > one["rss_warm_mib"] * RSS_RATIO + RSS_SLACK_MIB
    ]


def distinct(violations: Iterable[Mapping[str, object]], most: int = 3) -> list[Mapping[str, object]]:
    """A few of each kind: the first of each method and reason."""
    seen: Counter[tuple[object, ...]] = Counter()
    kept = []
    for one in violations:
        kind = (one.get("why"), one.get("method"), one.get("port"))
        seen[kind] += 1
        if seen[kind] <= most:
            kept.append(one)
    return kept


def verdict(problems: Sequence[str], violations: Sequence[object], sent: int, reached: int, attacks: int = 0) -> bool:
    """Whether the run shows what it is to show: nothing wrong, and not for lack of trying."""
    return not problems and not violations and sent + attacks > 0 and reached * 2 >= sent
