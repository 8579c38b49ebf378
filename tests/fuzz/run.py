"""One run: learn, send, look, judge."""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from headrace.cli.local_cluster import LocalCluster
from tests.fuzz.campaign import Campaign, plan, served
from tests.fuzz.canary import Canaries
from tests.fuzz.handles import Attacks
from tests.fuzz.methods import FENCED
from tests.fuzz.seeds import Seeds
from tests.fuzz.verdict import distinct, grown, uncounted, verdict
from tests.fuzz.watch import Watch
from tests.fuzz.world import World

ROUNDS: Final = 10
"""Times that everything stops and the canaries are asked, at most."""
LEAST_ROUND: Final = 250
"""Fewer messages make no round of their own."""


@dataclass(frozen=True)
class Size:
    messages: int
    handles: int
    seed: int = 1
    only: str = ""
    """Methods whose name holds it; empty: all."""


async def fuzz(cluster: LocalCluster, size: Size, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Everything, on a cluster that `world.running` made. Returns the report; `ok`: nothing was violated."""
    began = time.monotonic()
    world = await World.of(cluster)
    rng = random.Random(size.seed)
    seeds, watch, canaries = Seeds(world, rng), Watch(world), Canaries(world)
    campaign = Campaign(world, seeds, watch, rng)
    attacks = Attacks(world, seeds, rng)
    problems: list[str] = []
    memory: dict[str, dict[str, float]] = {}
    try:
        await canaries.learn()
        await seeds.learn()
        await watch.begin()
        before = await watch.counters()
        ports = await served(world)
        ports = {port: [one for one in methods if size.only in one.short] for port, methods in ports.items()}
        lots = plan(rng, size.messages, ports) if size.messages else []
        rounds = max(1, min(ROUNDS, size.messages // LEAST_ROUND))
        for index in range(rounds):
            await _beside(canaries, campaign, lots[index::rounds])
            await seeds.learn()
            await canaries.check()
            problems += await watch.same()
            problems += watch.logs()
            if index == rounds // 4:
                await watch.note_warm()
            tally = campaign.tally
            wrong = len(tally.violations) + len(problems) + len(canaries.violations)
            say(f"{tally.sent} sent, {tally.reached} reached, {wrong} violations, {time.monotonic() - began:.0f} s")
        if size.handles:
            await _attacks(canaries, campaign, attacks, size.handles)
            await canaries.check()
            problems += await watch.same()
            problems += watch.logs()
            say(f"{attacks.sent} attacks, {len(attacks.violations)} violations, {time.monotonic() - began:.0f} s")
        problems += uncounted(campaign.tally, before, await watch.counters())
        problems += await watch.leaks()
        memory = await watch.growth()
        problems += grown(memory)
    except Exception as error:  # noqa: BLE001 - whatever it was, the report says so
        # The run is over, and what it has seen is told all the same.
        problems += [*watch.dead(), f"the harness could not go on: {_leaves(error)}"]
        say(traceback.format_exc())
    finally:
        problems += watch.logs() + canaries.violations
        await world.close()
    tally = campaign.tally
    return {
        "ok": verdict(problems, [*tally.violations, *attacks.violations], tally.sent, tally.reached, attacks.sent),
        "seed": size.seed,
        "seconds": round(time.monotonic() - began, 1),
        "sent": tally.sent,
        "parsed": tally.parsed,
        "reached": tally.reached,
        "handles": attacks.sent,
        "violations": len(tally.violations) + len(attacks.violations),
        "problems": problems,
        "unmet": tally.unmet(),
        "canaries_exact": canaries.exact,
        "neighbour_refused": dict(canaries.refused),
        "role_changes": campaign.changed_roles,
        "memory": memory,
        "examples": distinct([*tally.violations, *attacks.violations]),
        "attacks": attacks.rows(),
        "methods": tally.rows(),
    }


async def _attacks(canaries: Canaries, campaign: Campaign, attacks: Attacks, count: int) -> None:
    """All attacks while the neighbour asks; after three quarters of them decode begins a new life."""
    over = asyncio.Event()
    asking = asyncio.create_task(canaries.neighbour(over, pause_s=0.0))
    try:
        await attacks.run(count - count // 4)
    finally:
        over.set()
        await asking
    await campaign.new_life("decode-0")
    await attacks.run(count // 4, fresh_old=False)


async def _beside(canaries: Canaries, campaign: Campaign, lots: list[Any]) -> None:
    """Send lots while the neighbour asks; fenced ones without it, as a drained replica has nothing to say."""
    over = asyncio.Event()
    asking = asyncio.create_task(canaries.neighbour(over))
    try:
        await campaign.run([lot for lot in lots if lot[1].short not in FENCED])
    finally:
        over.set()
        await asking
    await campaign.run([lot for lot in lots if lot[1].short in FENCED])


def _leaves(error: BaseException) -> str:
    """What a group of errors consists of."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_leaves(one) for one in error.exceptions)
    return f"{type(error).__name__}: {error}"[:1000]
