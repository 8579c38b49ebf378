"""Hit ratio, write amplification and disk use of the store's retention, replayed over a trace with a simulated clock.

    python -m bench.retention --trace mooncake_conversation.jsonl --json

The trace (JSON lines with timestamp in ms and hash_ids of 512-token blocks, as Mooncake publishes) is stretched to a
week. Expiry and refresh: four copies of it with fresh ids, a week apart, then two days without requests, once with all
traffic of class CHAT and once AGENT, on a disk of 1.3 times the unique blocks of a copy. Pressure: one copy on disks of
5 % and 20 % of the unique blocks, beside leaf-first LRU, S3-FIFO and FIFO, which manage single blocks, fill their space
to the last and write nothing twice. The store's policies are the very objects that the segment engine runs, with its
segments, its eviction from 90 to 80 % and its re-appends. A hit is a leading block that is there; each block weighs
four records of 118,784 B. Exit status 1 if a limit is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench._progress import Phases
from bench._report import JsonValue, Report, Scalar, arguments, emit, existing, positive
from bench.retention_harness.model import RECORD_BYTES
from bench.retention_harness.peers import PEERS
from bench.retention_harness.replay import Outcome, replay_peer, replay_store
from bench.retention_harness.trace import Trace, load_trace
from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.store.retention.classes import DAY
from headrace.router.simulate.traces import TraceError

WEEK = 7 * DAY
START_S = 1_700_000_000.0
"""Unix second at which simulated time begins."""
SHARES = (0.05, 0.20)
ROOMY = 1.3
"""Quota of the class replays, in unique blocks of a copy: what lives a week, and refreshed copies not yet expired."""
BELOW_LRU = 0.02
WRITE_AMPLIFICATION = 1.4


@dataclass(frozen=True)
class Limits:
    """The issue's, for the conversation trace of Mooncake; other traces have others."""

    chat: float = 0.363
    agent: float = 0.358


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--trace", type=existing, required=True, help="in Mooncake's format (JSON lines)")
    parser.add_argument("--rows", type=positive, help="only the first rows of the trace")
    parser.add_argument("--copies", type=positive, default=4, help="copies of the trace for the class replays")
    parser.add_argument("--chat-limit", type=float, default=Limits.chat, help="least hit ratio of class CHAT")
    parser.add_argument("--agent-limit", type=float, default=Limits.agent, help="least hit ratio of class AGENT")
    parser.add_argument("--without-refresh", action="store_true", help="control: hits prolong nothing")
    parser.add_argument("--without-rewrite", action="store_true", help="control: pressure re-appends nothing")
    parser.add_argument("--plot", type=Path, help="also write a picture (needs matplotlib)")
    options = parser.parse_args(argv)
    try:
        trace = load_trace(options.trace)
    except TraceError as error:
        parser.error(str(error))
    if options.rows:
        trace = Trace.of(trace.requests[: options.rows])
    trace = trace.stretched(WEEK)
    runs = measure(
        trace, options.copies, refresh=not options.without_refresh, rewrite=0.0 if options.without_rewrite else 0.3
    )
    report = build_report(options.trace.name, trace, runs, Limits(options.chat_limit, options.agent_limit))
    emit(report, as_json=options.json)
    if options.plot:
        from bench.retention_harness.plot import plot

        plot(options.plot, runs.classes, {f"{share:.0%}": runs.at(share) for share in SHARES})
    if not report.results["limits_met"]:
        sys.exit(1)


@dataclass(frozen=True)
class Runs:
    """All replays."""

    classes: dict[str, Outcome]
    """By class name, lower case."""
    capacities: dict[float, dict[str, Outcome]]
    """By share of the unique blocks, then policy."""

    def at(self, share: float) -> Sequence[Outcome]:
        return list(self.capacities[share].values())


def measure(trace: Trace, copies: int, *, refresh: bool, rewrite: float) -> Runs:
    """Every replay, one after the other; progress on stderr."""
    classes: dict[str, Outcome] = {}
    capacities: dict[float, dict[str, Outcome]] = {}
    with Phases() as phases:
        for retention in (RetentionClass.CHAT, RetentionClass.AGENT):
            name = retention.name.lower()
            with phases.phase(f"{name}: {copies} copies", copies * len(trace.requests)) as advance:
                classes[name] = replay_store(
                    trace.copies(copies, WEEK),
                    retention,
                    int(ROOMY * trace.unique),
                    start_s=START_S,
                    idle_s=2 * DAY,
                    refresh=refresh,
                    progress=advance,
                )
        for share in SHARES:
            quota = int(share * trace.unique)
            with phases.phase(f"quota {share:.0%}: store", len(trace.requests)) as advance:
                store = replay_store(
                    trace.requests,
                    RetentionClass.CHAT,
                    quota,
                    start_s=START_S,
                    refresh=refresh,
                    rewrite=rewrite,
                    progress=advance,
                )
            capacities[share] = {"store": store}
            for policy in PEERS:
                with phases.phase(f"quota {share:.0%}: {policy}", len(trace.requests)) as advance:
                    capacities[share][policy] = replay_peer(policy, trace, quota, advance)
    return Runs(classes, capacities)


def build_report(name: str, trace: Trace, runs: Runs, limits: Limits) -> Report:
    """The figures, each limit with whether it is met, and the table."""
    stores = [*runs.classes.values(), *(policies["store"] for policies in runs.capacities.values())]
    chat, agent = runs.classes["chat"], runs.classes["agent"]
    peak = max(outcome.peak_quota_share for outcome in stores)
    checks: dict[str, JsonValue] = {
        "chat_hit_ratio": chat.hit_ratio >= limits.chat,
        "agent_hit_ratio": agent.hit_ratio >= limits.agent,
        "only_unexpired_left": chat.left_expired_buckets == 0 and agent.left_expired_buckets == 0,
        "disk_within_quota": peak <= 1,
    }
    results: dict[str, JsonValue] = {
        "trace": name,
        "accesses": trace.accesses,
        "unique_blocks": trace.unique,
        "record_bytes": RECORD_BYTES,
        "chat_hit_ratio": chat.hit_ratio,
        "chat_limit": limits.chat,
        "chat_write_amplification": chat.write_amplification,
        "agent_hit_ratio": agent.hit_ratio,
        "agent_limit": limits.agent,
        "agent_write_amplification": agent.write_amplification,
        "expired_buckets_left": chat.left_expired_buckets + agent.left_expired_buckets,
        "unexpired_buckets_left": chat.left_buckets + agent.left_buckets,
        "disk_peak_share": peak,
    }
    for share, policies in runs.capacities.items():
        at = f"at_{share * 100:.0f}_percent"
        store, lru = policies["store"], policies["leaf_first_lru"]
        results |= {
            f"{at}_hit_ratio": store.hit_ratio,
            f"{at}_limit": lru.hit_ratio - BELOW_LRU,
            f"{at}_lru_hit_ratio": lru.hit_ratio,
            f"{at}_write_amplification": store.write_amplification,
        }
        checks[f"{at}_hit_ratio"] = store.hit_ratio >= lru.hit_ratio - BELOW_LRU
        checks[f"{at}_write_amplification"] = store.write_amplification <= WRITE_AMPLIFICATION
    results["write_amplification_limit"] = WRITE_AMPLIFICATION
    results["runs"] = {
        **{retention: _details(outcome) for retention, outcome in runs.classes.items()},
        **{f"store_at_{share * 100:.0f}_percent": _details(at["store"]) for share, at in runs.capacities.items()},
    }
    results["checks"] = checks
    results["limits_met"] = all(bool(met) for met in checks.values())
    rows = [_row(f"class {retention}", outcome) for retention, outcome in runs.classes.items()]
    for share in SHARES:
        rows += [_row(f"quota {share:.0%}", outcome) for outcome in runs.at(share)]
    missed = [check for check, met in checks.items() if not met]
    notes = [
        "Peers manage single blocks, are full to the last and write each block once; the store unlinks whole segments "
        "between 90 and 80 % of its quota.",
        "hits: leading blocks found, of all; writes: blocks written for each new one; disk: peak, of the quota; again: "
        "blocks re-appended, since a hit found under half of their life left or to free a segment.",
        f"Limits missed: {', '.join(missed)}." if missed else "Every limit is met.",
    ]
    return Report("retention", results, rows, notes)


def _row(case: str, outcome: Outcome) -> dict[str, Scalar]:
    return {
        "case": case,
        "policy": outcome.policy,
        "blocks": outcome.quota_blocks,
        "hits": round(outcome.hit_ratio, 4),
        "writes": round(outcome.write_amplification, 3),
        "disk": round(outcome.peak_quota_share, 3),
        "again": outcome.refreshed_blocks + outcome.rewritten_blocks,
        "evicted": outcome.evicted_blocks,
        "expired": outcome.expired_blocks,
    }


def _details(outcome: Outcome) -> dict[str, JsonValue]:
    fields = asdict(outcome)
    del fields["series"]
    return fields


if __name__ == "__main__":
    main()
