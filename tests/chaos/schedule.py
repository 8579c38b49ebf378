"""What happens when, and who asks what: pure functions of the seed. Nothing here looks at a clock or a process.

Faults stand in lanes, one per kind of process and one each for wires, disk and clock. A lane's faults happen one after
another, in this order; each at its time, or later when the cluster could not bear it then (faults.py). Requests do not
depend on time at all: the k-th request of client c is always the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.proxy import Spoil

SHORT_STOP = (0.3, 2.0)
LONG_STOP = (7.0, 10.0)
"""Seconds of SIGSTOP: below, and above, every silence and lease limit of the cluster (processes.py)."""
REDIS, ETCD, DISK, CLOCK, WIRE = "redis", "etcd", "disk", "clock", "wire"
WORKERS = ("encoder", "prefill", "decode")


class Kind(StrEnum):
    KILL = "kill"
    STOP = "stop"
    IN_TURN = "restart_in_turn"
    """Of etcd's members: killed and started again one after another."""
    WIRE = "wire"
    DISK_FULL = "disk_full"
    CLOCK_JUMP = "clock_jump"


@dataclass(frozen=True)
class Fault:
    """One fault."""

    at_s: float
    """Since the load began."""
    lane: str
    kind: Kind
    target: str
    """Name of a process, or of what else is hurt."""
    seconds: float = 0.0
    """How long it lasts; of a kill, how late what was killed is started again."""
    spoil: Spoil = Spoil.NOTHING
    towards_server: bool = True
    jump_s: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Faults per minute."""

    kills: Mapping[str, float]
    stops: Mapping[str, float]
    wires: float = 3.6
    disk: float = 0.5
    clock: float = 0.8
    in_turn: float = 0.3

    def of(self, lane: str) -> tuple[tuple[Kind, float], ...]:
        if lane == WIRE:
            return ((Kind.WIRE, self.wires),)
        if lane == DISK:
            return ((Kind.DISK_FULL, self.disk),)
        if lane == CLOCK:
            return ((Kind.CLOCK_JUMP, self.clock),)
        own = ((Kind.KILL, self.kills.get(lane, 0.0)), (Kind.STOP, self.stops.get(lane, 0.0)))
        return (*own, (Kind.IN_TURN, self.in_turn)) if lane == ETCD else own


LONG = Rates(
    kills={"router": 1.1, "encoder": 1.2, "prefill": 1.3, "decode": 1.7, REDIS: 0.6, ETCD: 0.6},
    stops={"router": 0.5, "encoder": 0.5, "prefill": 0.8, "decode": 1.0, REDIS: 0.3, ETCD: 0.3},
)
SPARED_S = 215.0
"""The first process of each role is not killed in the last seconds of a long round, so that it grows old."""


def faults(seed: int, seconds: float, processes: Mapping[str, Sequence[str]], rates: Rates = LONG) -> list[Fault]:
    """The faults of a round of so many seconds, by time. `processes`: kind → names. Every lane has one fault of each of
    its kinds at least."""
    found: list[Fault] = []
    for lane in (*processes, WIRE, DISK, CLOCK):
        rng = random.Random(f"{seed} faults {lane}")
        kinds = [kind for kind, rate in rates.of(lane) if rate for _ in range(max(1, round(rate * seconds / 60)))]
        rng.shuffle(kinds)
        for index, kind in enumerate(kinds):
            at = seconds * (index + 0.15 + 0.7 * rng.random()) / len(kinds)
            names = processes.get(lane, (lane,))
            found.append(_fault(rng, at, lane, kind, _names(names, kind, at, seconds), processes))
    return sorted(found, key=lambda fault: (fault.at_s, fault.lane))


def _names(names: Sequence[str], kind: Kind, at_s: float, seconds: float) -> Sequence[str]:
    spared = kind is Kind.KILL and len(names) > 1 and seconds >= SPARED_S and at_s > seconds - SPARED_S
    return names[1:] if spared else names


def _fault(
    rng: random.Random, at: float, lane: str, kind: Kind, names: Sequence[str], processes: Mapping[str, Sequence[str]]
) -> Fault:
    if kind is Kind.KILL:
        return Fault(at, lane, kind, rng.choice(names), seconds=rng.choice((0.0, 0.5, 2.0)))
    if kind is Kind.IN_TURN:
        return Fault(at, lane, kind, rng.choice(names), seconds=rng.choice((0.0, 0.5, 2.0)))
    if kind is Kind.STOP:
        length = SHORT_STOP if rng.random() < 0.5 else LONG_STOP
        return Fault(at, lane, kind, rng.choice(names), seconds=round(rng.uniform(*length), 1))
    if kind is Kind.WIRE:
        # Half of them between clients and routers.
        wired = [role for role in ("router", *WORKERS) if role in processes]
        role = "router" if rng.random() < 0.4 else rng.choice(wired)
        spoil = rng.choice([each for each in Spoil if each is not Spoil.NOTHING])
        length = {Spoil.DELAY: (1.0, 6.0), Spoil.DROP: (0.5, 8.0), Spoil.HALF_CLOSE: (0.2, 3.0)}.get(spoil, (0.1, 1.0))
        return Fault(
            at,
            lane,
            kind,
            rng.choice(processes[role]),
            seconds=round(rng.uniform(*length), 1),
            spoil=spoil,
            towards_server=rng.random() < 0.5,
        )
    if kind is Kind.DISK_FULL:
        return Fault(at, lane, kind, names[0], seconds=round(rng.uniform(2.0, 8.0), 1))
    return Fault(at, lane, kind, names[0], jump_s=rng.choice((-1, 1)) * rng.choice((2.0, 45.0, 3600.0, 90_000.0)))


class Manner(StrEnum):
    """How a client behaves."""

    PLAIN = "plain"
    CANCEL = "cancel"
    """Leaves after some tokens."""
    DEADLINE = "deadline"
    """Gives less time than the request may need."""
    SLOW = "slow"
    """Reads with long pauses."""
    RESUME = "resume"
    """Breaks its stream after some tokens, and resumes at the other router."""


_MANNERS = (
    (Manner.PLAIN, 68),
    (Manner.CANCEL, 9),
    (Manner.DEADLINE, 8),
    (Manner.SLOW, 6),
    (Manner.RESUME, 9),
)


@dataclass(frozen=True)
class Ask:
    """One request of one client."""

    client: int
    number: int
    template: int
    """Which of the known requests."""
    manner: Manner
    after_tokens: int
    """CANCEL, RESUME: when; SLOW: tokens between two pauses."""
    seconds: float
    """DEADLINE: how long it may take; SLOW: a pause."""
    router: int
    """Which router it asks first."""

    @property
    def name(self) -> str:
        return f"chaos-{self.client}-{self.number}"


def ask(seed: int, client: int, number: int, templates: int) -> Ask:
    """The `number`-th request of a client."""
    rng = random.Random(f"{seed} ask {client} {number}")
    manner = rng.choices([each for each, _ in _MANNERS], [weight for _, weight in _MANNERS])[0]
    return Ask(
        client,
        number,
        rng.randrange(templates),
        manner,
        after_tokens=rng.randint(1, 12),
        seconds=round(rng.uniform(0.1, 2.5) if manner is Manner.DEADLINE else rng.uniform(1.0, 7.0), 2),
        router=rng.randrange(2),
    )
