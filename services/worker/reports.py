"""What an engine says of itself, in the wire's words: load, conservation, pools, metrics (L11)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import fields

from headrace.engine.messages import CheckIntegrity, EngineStatus, GetStatus, PoolCounts
from headrace.engine.reports import WriteCounts
from headrace.kvcache.transfer.base import TransferStats
from headrace.services.runtime.metrics import Metrics
from headrace.services.worker.engine_link import EngineLink
from headrace.v1 import common_pb2, control_pb2

LOAD_PERIOD_S = 0.05
"""Least time between two looks at the engine's state for load reports."""

LIVENESS_S = 1.0
"""How often an idle engine thread is looked at."""


def load_report(status: EngineStatus, *, rank: int = 0) -> common_pb2.LoadReport:
    """Load of one rank as of its last step."""
    pools = {pool.name: pool for pool in status.pools}
    none = PoolCounts("none", 0, 0)
    rows = pools.get("rows", none)
    return common_pb2.LoadReport(
        rank=rank,
        queued_requests=status.waiting + status.preempted,
        queued_tokens=status.waiting_tokens,
        running_requests=status.running,
        reserved_requests=status.reserved,
        rows_used=rows.used,
        rows_cached=rows.cached,
        rows_total=rows.total,
        slots_used=status.total_slots - status.free_slots,
        slots_total=status.total_slots,
        landing_quarantined=pools.get("landing_rows", none).quarantined,
        step=status.steps,
        step_us=min(round(status.last_step.seconds * 1e6), 2**32 - 1),
        step_requests=status.last_step.requests,
        step_tokens=status.last_step.tokens,
        step_context_tokens=status.last_step.context_tokens,
        step_pairs=status.last_step.pairs,
        slots_peak=status.booked_peak,
        prompt_budget=status.prompt_budget,
        highest_attempt=status.highest_attempt,
    )


def conservation(status: EngineStatus, refused: int) -> control_pb2.Conservation:
    """Requests of one rank since start; `refused` ones were never accepted."""
    counted = status.conservation
    return control_pb2.Conservation(
        accepted=counted.accepted,
        live=counted.live,
        finished=counted.finished,
        cancelled=counted.cancelled,
        deadline=counted.deadline,
        failed=counted.failed,
        refused=refused,
    )


def pool_statuses(pools: Iterable[PoolCounts], *, rank: int = 0) -> tuple[control_pb2.PoolStatus, ...]:
    """Pools of one rank."""
    return tuple(
        control_pb2.PoolStatus(
            name=pool.name,
            rank=rank,
            total=pool.total,
            free=pool.free,
            used=pool.used,
            cached=pool.cached,
            quarantined=pool.quarantined,
            pinned=pool.pinned,
        )
        for pool in pools
    )


class EngineReporter:
    """Keeps the engine's latest status at hand: asked for anew after `refresh`, at most every LOAD_PERIOD_S."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self.on_status: Callable[[EngineStatus], None] = lambda status: None
        """Called with every status that is taken."""
        self._stale = asyncio.Event()
        self._stale.set()
        self.status: EngineStatus | None = None

    def refresh(self) -> None:
        """Something happened in the engine."""
        self._stale.set()

    def take(self, status: EngineStatus) -> None:
        """A status that somebody asked for."""
        self.status = status
        self.on_status(status)

    async def run(self) -> None:
        """A background task of the process; it fails, and the process with it, when the engine thread is dead."""
        while True:
            try:
                # Not wait_for, which in Python 3.11 loses a cancel that comes with what is waited for.
                async with asyncio.timeout(LIVENESS_S):
                    await self._stale.wait()
            except TimeoutError:
                if not self._link.alive:
                    raise RuntimeError("the engine thread is dead; see its error above") from None
                continue
            self._stale.clear()
            self.take(await self._link.call(GetStatus()))
            await asyncio.sleep(LOAD_PERIOD_S)

    def load(self) -> common_pb2.LoadReport | None:
        """The latest load, None before the first."""
        return None if self.status is None else load_report(self.status)

    async def inspect(self, check: bool, quiet: Callable[[], bool]) -> tuple[EngineStatus, tuple[str, ...]]:
        """Status of now, and the problems that an integrity check finds where it is asked for.

        While nothing lives and `quiet` says that no transfer is open, everything has to be given back too (L11).
        """
        before = await self._link.call(GetStatus())
        idle = quiet() and before.conservation.live == 0 and before.quarantined_bytes == 0
        problems = await self._link.call(CheckIntegrity(idle)) if check else ()
        status = await self._link.call(GetStatus())
        if idle and status.conservation.accepted != before.conservation.accepted:
            problems = await self._link.call(CheckIntegrity())
        self.take(status)
        return status, problems


def transport_statuses(stats: TransferStats) -> tuple[control_pb2.TransportStatus, ...]:
    """Wires in use. Agent names are `rank.incarnation` (the transfer engine's), cut to what UCX keeps of them."""
    return tuple(
        control_pb2.TransportStatus(
            peer=common_pb2.PeerId(incarnation=name.partition(".")[2]), transport=transport, bytes=0
        )
        for name, transport in sorted(stats.transports.items())
    )


def add_engine_metrics(metrics: Metrics, reporter: EngineReporter) -> None:
    """Gauges of the engine's state as of the last look at it."""

    def of(read: Callable[[EngineStatus], float]) -> Callable[[], float]:
        return lambda: 0.0 if reporter.status is None else read(reporter.status)

    metrics.gauge("engine_steps", "Steps since start", of(lambda status: status.steps))
    metrics.gauge("engine_prefill_tokens", "Prompt tokens computed since start", of(lambda s: s.prefill_tokens))
    metrics.gauge("engine_decode_tokens", "Tokens generated since start", of(lambda status: status.decode_tokens))
    metrics.gauge("engine_waiting_requests", "Requests that wait", of(lambda status: status.waiting))
    metrics.gauge("engine_waiting_tokens", "Prompt tokens that wait", of(lambda status: status.waiting_tokens))
    metrics.gauge("engine_running_sequences", "Sequences that run", of(lambda status: status.running))
    metrics.gauge("engine_preempted_sequences", "Sequences that were preempted", of(lambda status: status.preempted))
    metrics.gauge("engine_reserved_requests", "Reservations without data", of(lambda status: status.reserved))
    metrics.gauge("engine_live_requests", "Requests that live", of(lambda status: status.conservation.live))
    metrics.gauge("engine_spilled_bytes", "Host bytes of preempted sequences", of(lambda s: s.spilled_bytes))

    def pools() -> dict[tuple[str, ...], float]:
        found = reporter.status.pools if reporter.status is not None else ()
        return {
            (pool.name, state): float(getattr(pool, state))
            for pool in found
            for state in ("total", "free", "used", "cached", "quarantined", "pinned")
        }

    def offers() -> dict[tuple[str, ...], float]:
        counts = WriteCounts() if reporter.status is None else reporter.status.tier_writes
        return {(one.name,): float(getattr(counts, one.name)) for one in fields(counts)}

    metrics.gauges("engine_tier_offers", "Entries offered to the cache tier, and given up", ("what",), offers)
    metrics.gauges("pool_units", "Units of each pool by state", ("pool", "state"), pools)


def add_transfer_metrics(metrics: Metrics, stats: Callable[[], TransferStats]) -> None:
    """Gauges of the transfer engine."""
    metrics.gauge("transfer_open", "Transfers pushed under and not ended", lambda: stats().transfers_open)
    metrics.gauge("transfer_pushes_abandoned", "Pushes past their deadline", lambda: stats().pushes_abandoned)
    metrics.gauge("transfer_bytes_sent", "Bytes pushed since start", lambda: stats().bytes_sent)
    metrics.gauge("transfer_notices_received", "Terminal notices received", lambda: stats().notices_received)
    metrics.gauge("transfer_notices_undelivered", "Terminal notices not sent", lambda: stats().notices_undelivered)
    metrics.gauges(
        "transfer_peers",
        "Connected peers by transport",
        ("transport",),
        lambda: _count_by_transport(stats()),
    )


def _count_by_transport(stats: TransferStats) -> dict[tuple[str, ...], float]:
    counts: dict[tuple[str, ...], float] = {}
    for transport in stats.transports.values():
        counts[(transport,)] = counts.get((transport,), 0.0) + 1.0
    return counts
