"""Numbers of attempts go up whatever the wall clocks do (L16)."""

from __future__ import annotations

from headrace.router.topology import Role
from headrace.services.router.attempt_numbers import FROM_S, MOST_AHEAD, AttemptNumbers
from headrace.services.router.settings import RouterSettings
from headrace.services.router.workers import Workers
from headrace.services.runtime.clock import ManualClock
from headrace.services.runtime.registry import base
from headrace.v1 import common_pb2

DAY_S = 86_400.0


class Router:
    """Its two clocks. The monotonic one of each machine has an origin of its own."""

    def __init__(self, wall_s: float, monotonic_s: float) -> None:
        self.wall_s, self.clock = FROM_S + wall_s, ManualClock(monotonic_s)
        self.numbers = AttemptNumbers(self.clock, lambda: self.wall_s)


def test_a_wall_clock_that_jumps_changes_nothing_for_a_router_that_runs() -> None:
    router = Router(DAY_S, 7.0)
    before = router.numbers.now()
    router.wall_s -= DAY_S
    router.clock.advance(3.0)
    assert router.numbers.now() == before + 30
    router.wall_s += 10 * DAY_S
    assert router.numbers.now() == before + 30


def test_a_router_that_starts_after_the_clock_was_set_back_is_put_right_by_what_others_used() -> None:
    """L16: so that what it takes over from them wins; and it goes on from there, as time does."""
    old = Router(30 * DAY_S, 100.0)
    used = old.numbers.now()
    new = Router(29 * DAY_S, 5000.0)
    assert new.numbers.now() < used
    new.numbers.see(used)
    assert new.numbers.now() >= used
    new.clock.advance(1.0)
    assert new.numbers.now() >= used + 10
    new.numbers.see(used)
    assert new.numbers.now() <= used + 11
    # The clock of a machine is before 2026, and nobody has used a number yet.
    assert Router(-DAY_S, 0.0).numbers.now() == 0


def test_a_number_that_no_clock_can_have_given_is_not_followed() -> None:
    """L13: else every router would soon have no higher one to give."""
    router = Router(DAY_S, 0.0)
    before = router.numbers.now()
    router.numbers.see(2**32 - 1)
    assert router.numbers.now() == before
    router.numbers.see(before + MOST_AHEAD)
    assert before + MOST_AHEAD - 1 <= router.numbers.now() <= before + MOST_AHEAD + 1


async def test_loads_tell_what_numbers_were_used() -> None:
    """Those of prefills too: a decode that died has forgotten."""
    clock = ManualClock(0.0)
    workers = Workers(RouterSettings(), common_pb2.PeerId(replica_id="r", incarnation="1" * 32), clock)
    replica = base.Replica(
        id="prefill-0",
        incarnation="2" * 32,
        role=base.Role(Role.PREFILL.value),
        data_centre="dc",
        host="h",
        endpoint="127.0.0.1:1",
    )
    ahead = workers.numbers.now() + 5000
    workers.report(replica, common_pb2.LoadReport(highest_attempt=ahead))
    assert workers.numbers.now() >= ahead
