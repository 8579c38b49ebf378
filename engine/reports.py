"""What an engine tells about itself: conservation, pools, load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine.sequence import State

if TYPE_CHECKING:
    from headrace.engine.core import Engine


@dataclass(frozen=True)
class Conservation:
    """L11: accepted = live + finished + cancelled + deadline + failed; `live` is the size of the live set."""

    accepted: int
    live: int
    finished: int
    cancelled: int
    deadline: int
    failed: int

    @property
    def holds(self) -> bool:
        return self.accepted == self.live + self.finished + self.cancelled + self.deadline + self.failed


@dataclass(frozen=True)
class PoolCounts:
    """Units of one pool by state; total = free + cached + quarantined + those in use."""

    name: str
    total: int
    free: int
    cached: int = 0
    """Held for reuse only."""
    quarantined: int = 0
    """A peer may still write them."""
    pinned: int = 0
    """Of those in use or cached, the ones that a transfer reads."""

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached - self.quarantined


@dataclass(frozen=True)
class WriteCounts:
    """Entries offered to the cache tier since the start, and pins of now."""

    offered_blocks: int = 0
    offered_snapshots: int = 0
    dropped_blocks: int = 0
    """Their sequences ended while all pins were taken."""
    dropped_snapshots: int = 0
    pinned: int = 0


@dataclass(frozen=True)
class StepWork:
    """What one step did: the router learns from it what work costs."""

    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    """Computed."""
    context_tokens: int = 0
    """Before them, summed over the sequences."""
    pairs: int = 0
    """Σ new · (before + new/2): core-attention compute."""


@dataclass(frozen=True)
class EngineStatus:
    """A report for load balancing and `headrace status`."""

    conservation: Conservation
    waiting: int
    running: int
    preempted: int
    reserved: int
    free_rows: int
    total_rows: int
    free_slots: int
    total_slots: int
    spilled_bytes: int
    steps: int
    prefill_tokens: int
    decode_tokens: int
    waiting_tokens: int
    """Prompt tokens not yet computed of waiting and running requests: prefill load."""
    last_step: StepWork = StepWork()
    loads: int = 0
    """Prefixes on their way from the cache tier, of requests that are not queued yet."""
    tier_writes: WriteCounts = field(default_factory=WriteCounts)
    pools: tuple[PoolCounts, ...] = ()
    """Rows, slots and snapshots; decode: landing rows and slots too."""
    quarantined_bytes: int = 0
    booked_peak: int = 0
    """Decode role: most choices that held a slot at once, counted over live requests at every reservation (L23)."""
    prompt_budget: int = 0
    """Prompt tokens that a step has room for beside what runs."""
    highest_attempt: int = 0
    """Highest number of an attempt of any request since start."""
    landing_sound: bool = True
    """False when too much is quarantined: the worker is unready and rebuilds its landing region."""


def engine_status(engine: Engine) -> EngineStatus:
    """The report of an engine between two steps; its role adds what it alone knows."""
    states = [sequence.state for live in engine.ledger for sequence in live.sequences]
    rows, slots, most = engine.pool.row_region, engine.pool.slot_region, engine.settings.max_sequences
    return EngineStatus(
        conservation=engine.ledger.conservation(),
        waiting=engine.scheduler.waiting,
        running=len(engine.scheduler.running),
        preempted=engine.scheduler.preempted,
        reserved=states.count(State.RESERVED),
        free_rows=rows.available,
        total_rows=rows.capacity,
        free_slots=most - engine.scheduler.choices_held(),
        total_slots=most if slots.size == 0 else min(slots.capacity, most),
        spilled_bytes=engine.memory.spilled.used_bytes,
        steps=engine.steps,
        last_step=engine.last_step,
        prefill_tokens=engine.prefill_tokens,
        decode_tokens=engine.decode_tokens,
        loads=len(engine.memory.loads),
        tier_writes=engine.memory.writes.counts,
        pools=pool_counts(engine),
        waiting_tokens=sum(
            max(live.prompt_length - live.sequences[0].computed, 0)
            for live in engine.ledger
            if live.sequences[0].state in (State.QUEUED, State.RUNNING)
        ),
        prompt_budget=engine.scheduler.prompt_budget,
        highest_attempt=engine.ledger.highest_attempt,
    )


def pool_counts(engine: Engine) -> tuple[PoolCounts, ...]:
    """Rows, slots and snapshots, as far as the layout has them."""
    regions = (engine.pool.row_region, engine.pool.slot_region, engine.pool.snapshot_region)
    return tuple(
        PoolCounts(region.name, region.capacity, region.free, cached=region.cached, pinned=region.pinned)
        for region in regions
        if region.size > region.first
    )
