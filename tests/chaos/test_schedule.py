"""The schedule is a function of the seed, and has what a soak needs."""

from __future__ import annotations

from collections import Counter

from tests.chaos.requests import templates
from tests.chaos.round import seeds
from tests.chaos.schedule import LONG_STOP, SHORT_STOP, SPARED_S, Kind, Manner, ask, faults

PROCESSES = {
    "router": ("router-0", "router-1"),
    "encoder": ("encoder-0", "encoder-1"),
    "prefill": ("prefill-0", "prefill-1"),
    "decode": ("decode-0", "decode-1", "decode-2"),
    "redis": ("redis",),
    "etcd": ("etcd",),
}


def test_a_seed_gives_one_schedule_and_another_seed_another() -> None:
    assert faults(1, 600, PROCESSES) == faults(1, 600, PROCESSES)
    assert faults(1, 600, PROCESSES) != faults(2, 600, PROCESSES)
    assert [ask(1, 2, number, 30) for number in range(50)] == [ask(1, 2, number, 30) for number in range(50)]
    assert ask(1, 2, 3, 30) != ask(1, 2, 4, 30)
    assert seeds(1, 2) == seeds(1, 2) != seeds(2, 2)
    made = [[each.SerializeToString() for each in templates(7, 6, pictures=True, texts=True, tokens=20)] for _ in "ab"]
    assert made[0] == made[1]
    assert len(set(made[0])) == 6


def test_ten_minutes_have_more_faults_than_are_asked_for() -> None:
    """Show 1 asks for 100, with 40 kills, 3 of each kind of process; a busy machine does not get to do all."""
    for seed in range(5):
        plan = faults(seed, 240, PROCESSES) + faults(seed, 360, {k: v for k, v in PROCESSES.items() if k != "encoder"})
        kills = Counter(fault.lane for fault in plan if fault.kind is Kind.KILL)
        assert len(plan) >= 110
        assert sum(kills.values()) >= 48
        assert all(kills[kind] >= 4 for kind in PROCESSES)
        assert {fault.kind for fault in plan} == set(Kind)


def test_stops_are_shorter_and_longer_than_the_limits() -> None:
    stops = [fault.seconds for fault in faults(3, 600, PROCESSES) if fault.kind is Kind.STOP]
    assert any(seconds <= SHORT_STOP[1] for seconds in stops)
    assert any(seconds >= LONG_STOP[0] for seconds in stops)


def test_the_clock_jumps_both_ways() -> None:
    jumps = [fault.jump_s for fault in faults(3, 600, PROCESSES) if fault.kind is Kind.CLOCK_JUMP]
    assert min(jumps) < 0 < max(jumps)


def test_somebody_grows_old() -> None:
    """RSS is compared of processes that have lived three minutes."""
    killed = {
        fault.target for fault in faults(5, 330, PROCESSES) if fault.kind is Kind.KILL and fault.at_s > 330 - SPARED_S
    }
    assert not killed & {names[0] for names in PROCESSES.values() if len(names) > 1}


def test_clients_behave_in_every_manner() -> None:
    manners = Counter(ask(9, client, number, 30).manner for client in range(12) for number in range(40))
    assert set(manners) == set(Manner)
    assert manners[Manner.PLAIN] > 240
