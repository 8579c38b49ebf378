"""The engine's invariants, checked on demand: what the pool says is held is what live sequences hold (L7, L11)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.engine.sequence import State

if TYPE_CHECKING:
    from headrace.engine.core import Engine


def find_problems(engine: Engine, *, idle: bool) -> tuple[str, ...]:
    """Every broken invariant in words; `idle` also demands that nothing lives, is held or pinned."""
    problems = list(engine.pool.integrity().problems)
    conservation = engine.ledger.conservation()
    if not conservation.holds:
        problems.append(f"conservation is broken: {conservation}")
    problems += _ownership(engine)
    problems += _scheduling(engine)
    problems += engine.memory.writes.problems()
    problems += engine.role.problems()
    if idle:
        if conservation.live:
            problems.append(f"{conservation.live} requests live though the worker should be idle")
        if not engine.pool.integrity().idle:
            problems.append(f"the pool holds or pins units though the worker should be idle: {engine.pool.integrity()}")
        if not engine.role.idle():
            problems.append("transfers are under way or quarantined though the worker should be idle")
        if len(engine.memory.loads):
            problems.append(f"{len(engine.memory.loads)} loads are open though the worker should be idle")
        if engine.memory.spilled.used_bytes:
            problems.append(f"{engine.memory.spilled.used_bytes} spilled bytes belong to nobody")
    return tuple(problems)


def _ownership(engine: Engine) -> list[str]:
    problems: list[str] = []
    sequences = {sequence.owner: sequence for live in engine.ledger for sequence in live.sequences}
    regions = engine.pool.row_region, engine.pool.slot_region
    for region in regions:
        for owner in region.owners() - sequences.keys() - engine.memory.loads.owners:
            problems.append(f"{region.name}: {owner} holds {len(region.held_by(owner))} units and is not live")
    for owner, sequence in sequences.items():
        spares = set(sequence.live.spare_rows) if sequence.choice == 0 else set()
        if regions[0].held_by(owner) != set(sequence.blocks) | spares:
            problems.append(f"{owner}: the pool's rows are not the block table's")
        if len(set(sequence.blocks)) != len(sequence.blocks):
            problems.append(f"{owner}: a row stands twice in the block table")
        if sequence.state is State.ENDED and (sequence.blocks or sequence.slot or sequence.spilled):
            problems.append(f"{owner}: ended and still holds memory")
        room = len(sequence.blocks) * engine.pool.layout.block_tokens
        if sequence.state is State.RUNNING and sequence.computed > room:
            problems.append(f"{owner}: {sequence.computed} positions are computed in room for {room}")
    for owner in engine.memory.spilled.owners:
        if owner not in sequences or sequences[owner].spilled is None:
            problems.append(f"{owner}: spilled memory of nobody")
    return problems


def _scheduling(engine: Engine) -> list[str]:
    problems: list[str] = []
    scheduler = engine.scheduler
    places = {id(sequence): "running" for sequence in scheduler.running}
    for sequence in scheduler.queue:
        if id(sequence) in places:
            problems.append(f"{sequence.owner}: is running and queued")
        places[id(sequence)] = "queued"
    for live in engine.ledger:
        for sequence in live.sequences:
            expected = {State.RUNNING: "running", State.QUEUED: "queued"}.get(sequence.state)
            if places.pop(id(sequence), None) != expected:
                problems.append(f"{sequence.owner}: is {sequence.state.value} and not where that belongs")
    if places:
        problems.append(f"{len(places)} scheduled sequences belong to no live request")
    if sorted(scheduler.running, key=lambda sequence: sequence.age) != scheduler.running:
        problems.append("running sequences are out of order")
    return problems
