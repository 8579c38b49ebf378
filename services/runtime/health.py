"""Liveness and readiness (L18) behind the standard gRPC health service.

The service name '' is liveness: SERVING while the process can answer. The name 'ready' is readiness: SERVING only
after a canary request went through what the process serves, and no longer once it drains or degrades.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from grpc_health.v1 import health, health_pb2

from headrace.services.runtime import logs

LIVE: Final = ""
READY: Final = "ready"

_log = logs.get(__name__)


class _Servicer(health.aio.HealthServicer):
    """The package's, with the call that it lacks."""

    async def List(self, request: Any, context: Any) -> Any:
        """The status of every name. (The package's stubs know neither the messages nor the field.)"""
        package, statuses = cast(Any, health_pb2), cast(Any, self)._server_status
        return package.HealthListResponse(
            statuses={name: package.HealthCheckResponse(status=status) for name, status in statuses.items()}
        )


class Health:
    """The health of one process; `servicer` is added to its gRPC server."""

    def __init__(self) -> None:
        self.servicer = _Servicer()
        self._ready = False
        self._ended = False
        self.reason = "the canary has not run"
        """Why the process is not ready; empty when it is."""

    @property
    def ready(self) -> bool:
        """Whether new work is welcome."""
        return self._ready

    async def start(self) -> None:
        """Publish 'not ready', so that probes get an answer instead of NOT_FOUND."""
        await self.servicer.set(READY, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def become_ready(self, canary: Callable[[], Awaitable[None]]) -> None:
        """Run `canary` and be ready if it returns; what it raises is raised on and readiness stays off.

        This is the only way to readiness (L18). After `end` it has no effect, until `begin_again`.
        """
        await canary()
        if self._ended:
            return
        self._ready = True
        self.reason = ""
        await self.servicer.set(READY, health_pb2.HealthCheckResponse.SERVING)
        _log.info("ready")

    async def begin_again(self, canary: Callable[[], Awaitable[None]]) -> None:
        """Undo `end`: ready again if the canary is well, as `become_ready`."""
        self._ended = False
        try:
            await self.become_ready(canary)
        except BaseException:
            self._ended = True
            raise

    async def unready(self, reason: str) -> None:
        """Take no new work for now, e.g. as too much landing memory is in quarantine."""
        self._ready = False
        self.reason = reason
        await self.servicer.set(READY, health_pb2.HealthCheckResponse.NOT_SERVING)
        _log.warning("not ready", reason=reason)

    async def end(self) -> None:
        """Not ready: the process drains. Liveness stays on until the server closes."""
        self._ended = True
        self._ready = False
        self.reason = "draining"
        await self.servicer.set(READY, health_pb2.HealthCheckResponse.NOT_SERVING)
