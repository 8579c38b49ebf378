"""Two routers over the same decode ranks never overbook them (L23), and tell overload as what it is (L12).

    python -m bench.two_routers --runs 100 --json

Real processes around a real etcd: two routers with an empty queue (`admission.max_waiting=0`) and two with a queue of
24, one prefill, and 4 decode ranks of 10 slots. In each run 64 clients ask at once, half at either router, and hold
what they get open (they stop reading). With queue 0 exactly 40 must be accepted and 24 refused with RESOURCE_EXHAUSTED
and a time to come back; then all read on, the refused come back when they were told to, and all 64 must finish. With
queue 24 nobody may be refused.

The queue is the router's: a request that no decode rank has room for waits there, in order; decode itself answers a
reservation between two steps and lets nobody wait. Bookings are counted by decode itself, over its live requests, at
every reservation: `booked_peak` is the most that each rank ever had.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench._progress import Phases
from bench._report import Report, arguments, emit, positive
from bench.two_routers_harness.clients import Round, client
from bench.two_routers_harness.model import make_model
from bench.two_routers_harness.processes import EtcdCluster, Member, slots_peak, slots_used

CLIENTS, RANKS, SLOTS, QUEUE = 64, 4, 10, 24
ROOM = RANKS * SLOTS
PATIENCE_S = 180.0
"""Bound of every wait; nothing is asserted about how long it took."""
_LOAD = ("load.block_tokens=16", "load.native_kernels=false")
_PATIENT = (f"engine.pause_spill_s={2 * PATIENCE_S}", f"engine.pause_end_s={4 * PATIENCE_S}")
"""The clients do not read, and that is what holds their slots."""
_ENGINE = ("engine.kv_bytes=16777216", "engine.max_batched_tokens=64", "engine.snapshot_fraction=0.3")
_ROUTER = ("router.credit_tokens=2", f"admission.capacity_wait_seconds={PATIENCE_S}")


@dataclass(frozen=True)
class Outcome:
    """One run."""

    queue: int
    accepted: int
    refused: int
    finished: int
    retries: int
    booked_held: tuple[int, ...]
    """Slots in use per rank while all requests were held open."""
    least_retry_after_s: float | None
    errors: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether it is what the issue asks for."""
        expected = CLIENTS - ROOM if self.queue == 0 else 0
        told = self.least_retry_after_s is None or self.least_retry_after_s > 0
        counts = (self.accepted, self.refused, self.finished) == (ROOM, expected, CLIENTS)
        return counts and told and not self.errors and self.booked_held == (SLOTS,) * RANKS


def members(queues: tuple[int, ...] = (0, QUEUE)) -> list[Member]:
    """One prefill, the decode ranks, and two routers per size of the queue."""
    routers = [
        Member(f"router-{queue}-{side}", "router", (*_ROUTER, f"admission.max_waiting={queue}"))
        for queue in queues
        for side in "ab"
    ]
    prefill = Member("prefill-0", "prefill", (*_LOAD, *_ENGINE))
    decode_sets = (*_LOAD, *_ENGINE, *_PATIENT, f"engine.max_sequences={SLOTS}", "decode.landing_bytes=8MB")
    decodes = [Member(f"decode-{index}", "decode", decode_sets) for index in range(RANKS)]
    return [*routers, prefill, *decodes]


async def run_once(cluster: EtcdCluster, queue: int, name: str) -> Outcome:
    """64 clients at once at the two routers with that queue."""
    routers = [cluster.address(f"router-{queue}-{side}") for side in "ab"]
    decodes = [cluster.address(decode) for decode in cluster.names("decode")]
    outcome, let_go = Round(), asyncio.Event()
    clients = [
        asyncio.create_task(client(routers[index % 2], f"{name}-{index}", index, outcome, let_go))
        for index in range(CLIENTS)
    ]
    try:
        # With a queue, those that wait say nothing: the accepted are all that will be heard of.
        wanted = CLIENTS if queue == 0 else ROOM
        async with asyncio.timeout(PATIENCE_S), outcome.changed:
            await outcome.changed.wait_for(lambda: outcome.settled >= wanted)
        held = await asyncio.gather(*(asyncio.to_thread(slots_used, decode) for decode in decodes))
        let_go.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*clients)
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return Outcome(
        queue=queue,
        accepted=outcome.accepted,
        refused=outcome.refused,
        finished=outcome.finished,
        retries=outcome.retries,
        booked_held=tuple(held),
        least_retry_after_s=min(outcome.retry_after_s, default=None),
        errors=tuple(outcome.other_errors),
    )


def run_all(folder: Path, run_dir: Path, runs: int, advance: Callable[[], None]) -> tuple[list[Outcome], list[int]]:
    """`runs` runs of each queue, and the most that each decode rank ever had booked."""
    with EtcdCluster(folder, run_dir, members()) as cluster:
        outcomes = []
        for number in range(runs):
            for queue in (0, QUEUE):
                outcomes.append(asyncio.run(run_once(cluster, queue, f"q{queue}-{number}")))
                advance()
        return outcomes, [slots_peak(cluster.address(decode)) for decode in cluster.names("decode")]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=positive, default=100, help="runs of each queue (100)")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, Phases() as phases:
        folder = make_model(Path(scratch) / "model")
        with phases.phase("runs", 2 * options.runs) as advance:
            outcomes, peaks = run_all(folder, Path(scratch) / "run", options.runs, advance)
    wrong = [outcome for outcome in outcomes if not outcome.holds]
    rows = [
        {
            "queue": queue,
            "runs": sum(1 for outcome in outcomes if outcome.queue == queue),
            "as_asked": sum(1 for outcome in outcomes if outcome.queue == queue and outcome.holds),
            "accepted": _span(outcome.accepted for outcome in outcomes if outcome.queue == queue),
            "refused": _span(outcome.refused for outcome in outcomes if outcome.queue == queue),
            "finished": _span(outcome.finished for outcome in outcomes if outcome.queue == queue),
            "second_refusals": sum(outcome.retries for outcome in outcomes if outcome.queue == queue),
        }
        for queue in (0, QUEUE)
    ]
    report = Report(
        "two_routers",
        {
            "clients": CLIENTS,
            "ranks": RANKS,
            "slots": SLOTS,
            "runs": options.runs,
            "booked_peak": peaks,
            "holds": not wrong and max(peaks) <= SLOTS,
            "wrong": [str(outcome) for outcome in wrong[:10]],
            "seconds": round(time.monotonic() - begun, 1),
        },
        rows,
        ("booked_peak: most slots per rank, counted by decode over its live requests at every reservation.",),
    )
    emit(report, as_json=options.json)
    return 0 if report.results["holds"] else 1


def _span(values: object) -> str:
    found = sorted(set(values))  # type: ignore[call-overload]
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


if __name__ == "__main__":
    sys.exit(main())
