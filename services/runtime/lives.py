"""What a process carries from one life to the next, when it takes another role (L14, L19).

A life is one incarnation: registry entry, ports, pools, transfer agent, engine. Its successor has the same replica id
and, as far as they are still free, the same ports, so that operators find it where it was.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headrace.services.runtime import logs
from headrace.services.runtime.errors import HeadraceError, Internal, to_proto
from headrace.services.runtime.registry.base import Role
from headrace.services.runtime.registry.wire import role_to_wire
from headrace.v1 import control_pb2

ChangeRole = Callable[[Role, float], Awaitable[None]]
"""Begins a change to a role; what runs has so many seconds. Raises what stands against it."""
_log = logs.get(__name__)


@dataclass
class Lives:
    """Of one process. Belongs to the event loop's thread."""

    replica_id: str = ""
    """Empty before the first life."""
    port: int = 0
    """Of the gRPC server; 0 before the first life."""
    metrics_port: int = 0
    change: control_pb2.RoleChange | None = None
    """The last change of role, as Status tells it."""

    def begin(self, old: Role, new: Role) -> None:
        """A change has begun."""
        self.change = control_pb2.RoleChange(
            from_role=role_to_wire(old), to_role=role_to_wire(new), state=control_pb2.ROLE_CHANGE_STATE_DRAINING
        )

    @property
    def changing(self) -> bool:
        """A change is under way."""
        under_way = (control_pb2.ROLE_CHANGE_STATE_DRAINING, control_pb2.ROLE_CHANGE_STATE_STARTING)
        return self.change is not None and self.change.state in under_way

    def starting(self) -> None:
        """The old life is over."""
        assert self.change is not None
        self.change.state = control_pb2.ROLE_CHANGE_STATE_STARTING

    def joined(self) -> None:
        """A life has become ready: of a change, or of the return from one that failed."""
        if self.changing:
            assert self.change is not None
            self.change.state = control_pb2.ROLE_CHANGE_STATE_DONE

    def failed(self, error: BaseException) -> None:
        """The change is given up."""
        assert self.change is not None
        typed = error if isinstance(error, HeadraceError) else Internal(f"{type(error).__name__}: {error}")
        self.change.state = control_pb2.ROLE_CHANGE_STATE_FAILED
        self.change.error.CopyFrom(to_proto(typed))
        _log.error("the change of role is given up", error=str(typed))
