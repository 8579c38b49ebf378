"""What surrounds the servicers of any process: logs, metrics page, health, server, membership, control, in one order.

async def start(life):
    process = ServiceProcess(settings, life)
    … build the inside, then process.server.add(…) its servicers …
    await process.serve(inspect, live)      # the port answers, liveness is on
    await process.join(replica, canary)     # readiness only after the canary (L18), then membership
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from headrace.services.runtime import logs
from headrace.services.runtime.cache_operations import CacheOperations
from headrace.services.runtime.clock import Clock, SystemClock
from headrace.services.runtime.control import Authorise, ControlServicer, Inspect, anyone
from headrace.services.runtime.health import Health
from headrace.services.runtime.intake import HandOver, Intake
from headrace.services.runtime.intercept import Translate
from headrace.services.runtime.lifecycle import Lifecycle
from headrace.services.runtime.lives import ChangeRole, Lives
from headrace.services.runtime.metrics import Metrics, MetricsServer
from headrace.services.runtime.registry.base import Registry, Replica, State
from headrace.services.runtime.registry.member import Membership
from headrace.services.runtime.registry.open import open_registry
from headrace.services.runtime.server import ServiceServer
from headrace.services.runtime.settings import FrontSettings, ServiceSettings
from headrace.services.runtime.tls import open_tls
from headrace.v1 import common_pb2, control_pb2, control_pb2_grpc

_log = logs.get(__name__)


class ServiceProcess:
    """One life's surroundings. Made first in the start function; closes itself with the Lifecycle."""

    def __init__(
        self,
        settings: ServiceSettings,
        life: Lifecycle,
        translate: Translate | None = None,
        front: FrontSettings | None = None,
        lives: Lives | None = None,
    ) -> None:
        """`lives`: of a process that may have several. Raises SettingsError when the TLS files cannot be used."""
        self.settings = settings
        self._lives = lives = Lives() if lives is None else lives
        self.life = life
        self.clock: Clock = SystemClock()
        if not lives.replica_id:
            own = f"{settings.ROLE}-{settings.host_name}-{secrets.token_hex(3)}"
            lives.replica_id = settings.replica_id or own
        self.replica_id = lives.replica_id
        self.peer = common_pb2.PeerId(replica_id=self.replica_id, incarnation=life.incarnation)
        logs.configure(settings.log, role=settings.ROLE.value, replica=self.replica_id)
        self.metrics = Metrics(role=settings.ROLE.value, replica=self.replica_id, model=settings.model.name)
        self.health = Health()
        self.tls = open_tls(settings.tls)
        """Of every port and channel of the process; None: plain text."""
        listen = settings.listen.model_copy(update={"port": settings.listen.port or lives.port})
        self.server = ServiceServer(listen, settings.rpc, self.metrics, self.health, translate, self.tls, front)
        self.metrics_endpoint = ""
        self.membership: Membership | None = None
        self.intake: Intake
        """Set by `serve`."""
        self._started_unix_ms = round(time.time() * 1000)
        if settings.metrics.enabled:
            port = settings.metrics.port or lives.metrics_port
            page = MetricsServer(self.metrics, settings.metrics.host, port, self.tls)
            lives.metrics_port = page.port
            self.metrics_endpoint = f"{page.host}:{page.port}"
            life.on_close("metrics", _sync(page.close))

    def replica(self) -> Replica:
        """The membership entry of this process with what is the same for every role; callers add the rest."""
        return Replica(
            id=self.replica_id,
            incarnation=self.life.incarnation,
            role=self.settings.ROLE,
            data_centre=self.settings.data_centre,
            host=self.settings.host_name,
            endpoint=self.server.address,
            metrics_endpoint=self.metrics_endpoint,
            version=headrace_version(),
            pid=os.getpid(),
            started_unix_ms=self._started_unix_ms,
        )

    async def serve(
        self,
        inspect: Inspect,
        live: Callable[[], int],
        published: Callable[[], Replica],
        caches: CacheOperations | None = None,
        authorise: Authorise = anyone,
        hand_over: HandOver | None = None,
        change_role: ChangeRole | None = None,
    ) -> None:
        """Open the port with ControlService beside what was added. `live` counts requests that a drain waits for;
        `published` is the membership entry before this process has joined; `caches` what operators may manage;
        `authorise` tells who is one; `hand_over` ends what outlasts a drain; `change_role` begins another life."""
        self.intake = Intake(self.server, self.health, live, self.clock)
        self.intake.hand_over = hand_over
        control = ControlServicer(
            replica=lambda: published() if self.membership is None else self.membership.replica,
            health=self.health,
            inspect=inspect,
            intake=self.intake,
            clock=self.clock,
            lives=self._lives,
            change_role=change_role,
            caches=caches,
            authorise=authorise,
        )
        self.server.add(
            control_pb2_grpc.add_ControlServiceServicer_to_server,
            control,
            control_pb2.DESCRIPTOR.services_by_name["ControlService"],
        )
        self._lives.port = await self.server.start()
        self.life.on_close("server", self.server.stop)
        self.life.on_stop_accepting("admission", self._refuse)
        self.life.on_drain("requests", self.intake.idle)

    async def _refuse(self) -> None:
        self.intake.ending = "this process is ending"
        await self.intake.refuse()

    async def join(
        self, replica: Replica, canary: Callable[[], Awaitable[None]], registry: Registry | None = None
    ) -> Registry:
        """Run the canary, become ready, and be a member from then on. Returns the registry in use."""
        if registry is None:
            registry = open_registry(self.settings.registry, self.settings.rpc, self.tls)
            self.life.on_close("registry", registry.close)
        await self.health.become_ready(canary)
        membership = Membership(
            registry,
            replace(replica, state=State.READY),
            self.settings.registry.ttl_seconds,
            on_replaced=lambda: self.life.stop("another process took this replica id", exit_code=1),
        )
        self.membership = self.intake.membership = membership
        self.intake.canary = canary
        self.life.on_close("membership", membership.leave)
        # First of all closings, while everybody can still be told.
        self.life.on_close("hand-over", partial(self.intake.end_rest, "this worker stops"))
        self._lives.joined()
        self.life.spawn(membership.run(), "membership")
        return registry


def headrace_version() -> str:
    """The installed version, or `source` on a machine that runs from PYTHONPATH."""
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "source"


def _sync(call: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        call()

    return run
