"""Real service processes for tests, and the registry they meet in, which lives in the test's own process.

    async with Cluster(folder, tmp_path) as cluster:
        prefill = await cluster.start("prefill")
        decode = await cluster.start("decode", "decode.landing_bytes=1MB")

A worker is returned when it has registered itself as ready, i.e. after its canary.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import grpc.aio

from headrace.services.runtime.health import Health
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.registry.base import Added, Changed, Removed, Replica, State
from headrace.services.runtime.registry.embedded import EmbeddedRegistry
from headrace.services.runtime.registry.service import RegistryServicer
from headrace.services.runtime.registry.table import MembershipTable
from headrace.services.runtime.server import ServiceServer, open_channel
from headrace.services.runtime.settings import ListenSettings, RpcSettings
from headrace.v1 import common_pb2, control_pb2, control_pb2_grpc, registry_pb2, registry_pb2_grpc
from tests.zygote import SERVE_PROCESS, ZYGOTE, ForkedProcess

PATIENCE_S = 120.0
"""Bound of every wait on a busy machine; nothing is asserted about how long it took."""
RPC = RpcSettings()
EXACT = (
    "load.dtype=float32",
    "load.entry_format=float32",
    "load.batch_invariant=true",
    "load.block_tokens=16",
    # Compiling them takes longer than all tests of a process; tests/kernels compares them with torch.
    "load.native_kernels=false",
)
POOL = (
    "engine.kv_bytes=16777216",
    "engine.max_sequences=8",
    "engine.max_batched_tokens=40",
    "engine.snapshot_fraction=0.3",
)
SMALL = (
    *POOL,
    "engine.lease_s=3",
    "log.format=json",
    "log.level=info",
)


@dataclass(eq=False)
class WorkerProcess:
    """One process of the cluster."""

    process: ForkedProcess
    log: Path
    replica: Replica
    channel: grpc.aio.Channel = field(init=False)

    def __post_init__(self) -> None:
        self.channel = open_channel(self.replica.endpoint, RPC)

    @property
    def peer(self) -> common_pb2.PeerId:
        return common_pb2.PeerId(replica_id=self.replica.id, incarnation=self.replica.incarnation)

    async def status(self) -> control_pb2.StatusResponse:
        """State, pools and integrity; while nothing lives, idle integrity."""
        return await control_pb2_grpc.ControlServiceStub(self.channel).Status(
            control_pb2.StatusRequest(check_integrity=True), timeout=PATIENCE_S
        )

    async def until_idle(self) -> control_pb2.StatusResponse:
        """Wait until every request has ended and every pool is empty but for caches; fails when that never comes."""
        problem = ""
        for _ in range(int(PATIENCE_S / 0.05)):
            status = await self.status()
            problem = busy(status)
            if not problem:
                return status
            await asyncio.sleep(0.05)
        raise AssertionError(f"{self.replica.id} does not become idle: {problem}\n{self.tail()}")

    async def until_logged(self, event: str) -> None:
        """Wait for a line of its log."""
        for _ in range(int(PATIENCE_S / 0.05)):
            if event in self.log.read_text(encoding="utf-8", errors="replace"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{self.replica.id} never logged {event!r}\n{self.tail()}")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def freeze(self) -> None:
        """SIGSTOP, and wait until every thread stands still."""
        self.send(signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):
            while not stands_still(self.process.pid):  # noqa: ASYNC110 - the kernel's doing
                await asyncio.sleep(0.001)

    async def kill(self) -> None:
        """As the kernel's out-of-memory killer does it."""
        if self.process.returncode is None:
            self.process.kill()
        await asyncio.wrap_future(self.process.ended)

    async def stop(self) -> int:
        """SIGTERM; the exit status."""
        if self.process.returncode is None:
            self.process.terminate()
        return await asyncio.wait_for(asyncio.wrap_future(self.process.ended), PATIENCE_S)

    def tail(self, lines: int = 30) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def stands_still(pid: int) -> bool:
    """Whether every thread of a process is stopped (proc(5))."""
    stats = [task.read_text(errors="replace") for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] in "TZ" for stat in stats)


def busy(status: control_pb2.StatusResponse) -> str:
    """Why a worker is not idle; empty when it is (L11)."""
    requests = status.requests
    ended = requests.finished + requests.cancelled + requests.deadline + requests.failed
    if requests.accepted != requests.live + ended:
        return f"conservation is broken: {requests}"
    if requests.live:
        return f"{requests.live} requests live"
    for pool in status.pools:
        if pool.used or pool.quarantined or pool.pinned:
            return f"pool {pool.name}: {pool}"
    return "; ".join(status.integrity.problems)


class Cluster:
    """Workers of one model around one registry."""

    def __init__(self, folder: Path, scratch: Path, ttl_seconds: float = 5.0) -> None:
        self.folder = folder
        self.ttl_seconds = ttl_seconds
        self._scratch = scratch
        table = MembershipTable()
        self.registry = EmbeddedRegistry(table)
        self.workers: list[WorkerProcess] = []
        metrics, health = Metrics(), Health()
        self._server = ServiceServer(ListenSettings(), RPC, metrics, health)
        self._server.add(
            registry_pb2_grpc.add_RegistryServiceServicer_to_server,
            RegistryServicer(table),
            registry_pb2.DESCRIPTOR.services_by_name["RegistryService"],
        )
        self._count = 0

    async def __aenter__(self) -> Cluster:
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            await worker.channel.close()
            if worker.process.returncode is None:
                worker.send(signal.SIGCONT)
            await worker.kill()
            if kind is not None:
                sys.stderr.write(f"--- {worker.replica.id}\n{worker.tail()}\n")
        await self.registry.close()
        await self._server.stop()

    async def start(self, role: str, *sets: str) -> WorkerProcess:
        """Start a process and wait until it is a ready member."""
        self._count += 1
        name = f"{role}-{self._count}"
        log = self._scratch / f"{name}.log"
        arguments = [
            f"replica_id={name}",
            f"model.folder={self.folder}",
            f"registry.address={self._server.address}",
            f"registry.ttl_seconds={self.ttl_seconds}",
            f"stop.parent_pid={os.getpid()}",
            "metrics.enabled=false",
        ]
        arguments += EXACT if role != "router" else ()
        arguments += SMALL if role in ("prefill", "decode") else ()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = ZYGOTE.popen(SERVE_PROCESS, [role, *arguments, *sets], environ=environment, log=log)
        try:
            replica = await self._ready(name, process)
        except BaseException:
            if process.returncode is None:
                process.kill()
            await asyncio.wrap_future(process.ended)
            sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
            raise
        worker = WorkerProcess(process, log, replica)
        self.workers.append(worker)
        return worker

    async def start_all(self, *roles: str) -> None:
        """Several at once."""
        await asyncio.gather(*(self.start(role) for role in roles))

    async def ensure(self, role: str) -> WorkerProcess:
        """A running worker of a role: one that is there, else a new one."""
        running = (each for each in self.workers if each.replica.role.value == role and each.process.returncode is None)
        return next(running, None) or await self.start(role)

    def __getitem__(self, role: str) -> WorkerProcess:
        """The first worker of a role."""
        return next(worker for worker in self.workers if worker.replica.role.value == role)

    async def until_idle(self) -> None:
        """All engine workers have given everything back."""
        for worker in self.workers:
            if worker.process.returncode is None and worker.replica.role.value in ("prefill", "decode"):
                await worker.until_idle()

    async def _ready(self, name: str, process: ForkedProcess) -> Replica:
        found = asyncio.ensure_future(self._member(name))
        ended = asyncio.wrap_future(process.ended)
        try:
            await asyncio.wait({found, ended}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            assert found.done(), f"{name} did not become ready (exit status {process.returncode})"
            return found.result()
        finally:
            found.cancel()
            ended.cancel()

    async def _member(self, name: str) -> Replica:
        async with self._watch() as events:
            async for event in events:
                if not isinstance(event, Added | Changed) or event.replica.id != name:
                    continue
                if event.replica.state is State.READY:
                    return event.replica
        raise AssertionError("a watch never ends")

    async def gone(self, worker: WorkerProcess) -> None:
        """Wait until the registry has removed this life of a worker."""
        members = await self.registry.members()
        if all(member.incarnation != worker.replica.incarnation for member in members):
            return
        async with self._watch() as events:
            async for event in events:
                if isinstance(event, Removed) and event.replica.incarnation == worker.replica.incarnation:
                    return

    @asynccontextmanager
    async def _watch(self) -> AsyncIterator[AsyncIterator[object]]:
        events = self.registry.watch()
        try:
            yield events
        finally:
            await events.aclose()
