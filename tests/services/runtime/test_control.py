"""What ControlService answers of any process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.services.runtime.clock import ManualClock
from headrace.services.runtime.control import ControlServicer
from headrace.services.runtime.errors import InvalidArgument, Unimplemented
from headrace.services.runtime.health import Health
from headrace.services.runtime.intake import Intake
from headrace.services.runtime.lives import Lives
from headrace.services.runtime.registry.base import Role
from headrace.v1 import control_pb2, registry_pb2


class Server:
    """The part of ServiceServer that a drain uses."""

    draining = False

    async def refuse_admission(self) -> None:
        self.draining = True


CONTEXT: Any = SimpleNamespace(invocation_metadata=lambda: ())


def control(server: Server, role: Role) -> ControlServicer:
    clock, health = ManualClock(), Health()
    serving: Any = server
    unused: Any = None
    replica: Any = SimpleNamespace(role=role)
    intake = Intake(serving, health, lambda: 0, clock)
    return ControlServicer(lambda: replica, health, unused, intake, clock, Lives())


@pytest.mark.parametrize("role", [Role.ROUTER, Role.ENCODER])
async def test_who_hands_nothing_over_says_so(role: Role) -> None:
    """A field that is not implemented is refused, never ignored, and nothing has happened then."""
    server = Server()
    served = control(server, role)
    with pytest.raises(Unimplemented, match=role.value) as refused:
        await served.Drain(control_pb2.DrainRequest(hand_over=True), CONTEXT)
    assert refused.value.field == "hand_over"
    assert not server.draining
    answer = await served.Drain(control_pb2.DrainRequest(), CONTEXT)
    assert (answer.live, answer.state, server.draining) == (0, registry_pb2.REPLICA_STATE_DRAINING, True)


async def test_a_wait_beyond_every_clock_is_refused() -> None:
    """L13: typed, and nothing has happened then."""
    server = Server()
    served = control(server, Role.ENCODER)
    with pytest.raises(InvalidArgument) as refused:
        await served.Drain(control_pb2.DrainRequest(wait_ms=2**64 - 1), CONTEXT)
    assert refused.value.field == "wait_ms"
    assert not server.draining
