"""Plays a scenario on a simulation: deaths, returns, slowness, lies, changes of role."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.router.simulate.cluster import Simulation
from headrace.router.simulate.decode import DecodeReplica
from headrace.router.simulate.prefill import PrefillRank
from headrace.router.simulate.request import Attempt
from headrace.router.simulate.scenario import Event, Scenario, ScenarioError
from headrace.router.topology import Role

DRAIN_POLL_S = 0.5
"""How often a draining replica is looked at."""


@dataclass(eq=False, slots=True)
class _Replica:
    """A replica by its name in the scenario, in its present role."""

    name: str
    role: Role
    ranks: list[int]
    """Numbers of the simulation: of prefill ranks, or of decode ranks."""
    decode: int = -1
    """Number of its decode replica."""
    life: int = 0
    known: bool = True
    """The router believes that this life serves."""
    changing: bool = False


class Chaos:
    """Knows replicas by name and does to them what a scenario says."""

    def __init__(self, simulation: Simulation, scenario: Scenario) -> None:
        """Raises ScenarioError for a replica that is not there."""
        self._simulation = simulation
        self._replicas: dict[str, _Replica] = {}
        size = simulation.cluster.ranks_per_prefill_replica
        for number in range(simulation.cluster.prefill_ranks // size):
            self._add(_Replica(f"prefill-{number}", Role.PREFILL, list(range(number * size, (number + 1) * size))))
        first = 0
        for one in simulation.decode:
            ranks = list(range(first, first + one.ranks))
            self._add(_Replica(f"decode-{one.number}", Role.DECODE, ranks, one.number))
            first += one.ranks
        self.log: list[str] = []
        """What happened, a line each."""
        for event in scenario.events:
            if event.replica and event.replica not in self._replicas:
                raise ScenarioError(f"{event.replica} is no replica of this cluster, which has {self._names()}")
            simulation.clock.at(event.at, self._play, event)

    def _add(self, replica: _Replica) -> None:
        self._replicas[replica.name] = replica

    def _names(self) -> str:
        roles = [name.partition("-")[0] for name in self._replicas]
        return ", ".join(f"{role}-0 … {role}-{roles.count(role) - 1}" for role in dict.fromkeys(roles))

    def _tell(self, text: str) -> None:
        self.log.append(f"{self._simulation.clock.now:.2f} s: {text}")

    def _play(self, event: Event) -> None:
        if event.do == "rebalance":
            self._rebalance(event.prefill, event.decode)
            return
        replica = self._replicas[event.replica]
        self._tell(f"{event.do} {event.replica}")
        keys = {(replica.role, rank) for rank in replica.ranks}
        match event.do:
            case "die":
                self._die(replica)
            case "return":
                self._return(replica)
            case "slow":
                for engine in self._engines(replica):
                    engine.slowdown = event.factor
            case "mute":
                self._simulation.reports.silent |= keys
            case "lie" | "absurd":
                self._simulation.reports.liars |= dict.fromkeys(keys, event.do)
            case "role":
                self._change(replica, Role(event.to))

    def _engines(self, replica: _Replica) -> Sequence[PrefillRank | DecodeReplica]:
        simulation = self._simulation
        if replica.role is Role.DECODE:
            return [simulation.decode[replica.decode]]
        return [simulation.prefill[rank] for rank in replica.ranks]

    def _held(self, replica: _Replica) -> set[Attempt]:
        simulation = self._simulation
        if replica.role is Role.DECODE:
            return set(simulation.at_decode[replica.decode])
        return {attempt for rank in replica.ranks for attempt in simulation.at_prefill[rank]}

    def _die(self, replica: _Replica) -> None:
        """Everything there is lost; the router sees it a while later."""
        if not all(engine.alive for engine in self._engines(replica)):
            self._tell(f"{replica.name} is dead already")
            return
        lost = self._held(replica)
        for engine in self._engines(replica):
            engine.die()
        self._simulation.clock.after(self._simulation.cluster.detect_s, self._see, replica, replica.life, lost)

    def _see(self, replica: _Replica, life: int, lost: Iterable[Attempt]) -> None:
        if life == replica.life:
            self._leave(replica)
        failed = frozenset((replica.role, rank) for rank in replica.ranks)
        for attempt in sorted(lost, key=lambda attempt: attempt.request.number):
            self._simulation.lose(attempt, failed)

    def _leave(self, replica: _Replica) -> None:
        """The router knows that this life is over."""
        if replica.known:
            replica.known = False
            for rank in replica.ranks:
                self._simulation.router.gone(replica.role, rank)

    def _return(self, replica: _Replica) -> None:
        """A new life (L14), healthy and empty, with the same ranks."""
        if any(engine.alive for engine in self._engines(replica)):
            self._tell(f"{replica.name} is alive and stays")
            return
        self._leave(replica)
        replica.life += 1
        replica.known = True
        simulation = self._simulation
        for engine in self._engines(replica):
            engine.come_back()
        for index, rank in enumerate(replica.ranks):
            simulation.reports.silent.discard((replica.role, rank))
            simulation.reports.liars.pop((replica.role, rank), None)
            simulation.router.join(replica.role, rank, replica.name, replica.life, index)

    def _change(self, replica: _Replica, role: Role) -> None:
        """Drain (L19), then serve as the other role."""
        if replica.role is role or replica.changing or not replica.known:
            self._tell(f"{replica.name} cannot become {role.value}: it is {replica.role.value} or under way")
            return
        replica.changing = True
        for rank in replica.ranks:
            self._simulation.router.leave(replica.role, rank)
        self._drain(replica, role)

    def _drain(self, replica: _Replica, role: Role) -> None:
        simulation = self._simulation
        if self._held(replica) or not all(engine.idle for engine in self._engines(replica)):
            simulation.clock.after(DRAIN_POLL_S, self._drain, replica, role)
            return
        self._tell(f"{replica.name} has drained")
        for engine in self._engines(replica):
            engine.die()
        self._leave(replica)
        simulation.clock.after(simulation.cluster.change_s, self._serve, replica, role)

    def _serve(self, replica: _Replica, role: Role) -> None:
        simulation, count = self._simulation, len(replica.ranks)
        replica.life += 1
        replica.role, replica.known, replica.changing = role, True, False
        if role is Role.DECODE:
            first = len(simulation.decode_ranks)
            replica.decode = simulation.add_decode(replica.name, count, replica.life).number
            replica.ranks = list(range(first, first + count))
        else:
            replica.decode = -1
            replica.ranks = [simulation.add_prefill(replica.name, index, replica.life).number for index in range(count)]
        self._tell(f"{replica.name} serves as {role.value}")

    def _rebalance(self, prefill: int, decode: int) -> None:
        """Replicas of the role that has too many ranks change, the last ones first, unless it would have too few then.
        A ratio of other ranks than those that serve is not played."""
        serving = [replica for replica in self._replicas.values() if replica.known and not replica.changing]
        have = {
            role: sum(len(one.ranks) for one in serving if one.role is role) for role in (Role.PREFILL, Role.DECODE)
        }
        self._tell(f"rebalance {have[Role.PREFILL]}+{have[Role.DECODE]} to {prefill}+{decode}")
        if prefill + decode != sum(have.values()):
            self._tell(f"{sum(have.values())} ranks serve, not {prefill + decode}: they stay as they are")
            return
        surplus, other = (Role.PREFILL, Role.DECODE) if have[Role.PREFILL] > prefill else (Role.DECODE, Role.PREFILL)
        wanted = prefill if surplus is Role.PREFILL else decode
        for replica in reversed([one for one in serving if one.role is surplus]):
            if have[surplus] - len(replica.ranks) < wanted:
                break
            have[surplus] -= len(replica.ranks)
            self._change(replica, other)
