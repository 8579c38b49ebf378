"""The books of a simulation: what was taken has to be given back (L11)."""

from __future__ import annotations

from headrace.router.simulate.cluster import Simulation


def problems(simulation: Simulation) -> list[str]:
    """What is wrong with the books of engines, requests and router; empty when all is well. Ask when nothing is under
    way."""
    found = []
    ended = sum(simulation.ends.values())
    if simulation.accepted != len(simulation.live) + ended:
        found.append(f"{simulation.accepted} accepted, {len(simulation.live)} live, {ended} ended")
    if simulation.live:
        found.append(f"{len(simulation.live)} requests have no end")
    held = sum(map(len, simulation.at_prefill.values())) + sum(map(len, simulation.at_decode.values()))
    if held:
        found.append(f"{held} attempts are held by ranks")
    for one in simulation.decode:
        if one.requests.any() or one.kv.any() or one.booked.any():
            found.append(f"decode replica {one.number} holds {one.running} requests, {int(one.kv.sum())} KV tokens")
    found += [f"prefill rank {rank.number} is not idle" for rank in simulation.prefill if not rank.idle]
    if not simulation.router.idle:
        found.append("the router counts work in flight")
    return found
