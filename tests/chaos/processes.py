"""The cluster: etcd, Redis, routers and workers, each behind a proxy of its own; what was killed is started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from bench._ports import free_ports
from bench.tier_harness.processes import Server, redis_server
from headrace.services.runtime.server import open_channel
from headrace.services.runtime.settings import RpcSettings
from headrace.v1 import common_pb2, control_pb2, control_pb2_grpc, registry_pb2
from tests.chaos.clock import WallClock
from tests.chaos.proxy import Proxy
from tests.chaos.schedule import ETCD, REDIS
from tests.chaos.servers import etcd_servers, registered, wait_until_healthy
from tests.services.cluster import POOL
from tests.zygote import HEADRACE, ForkedProcess, Zygote

START_S = 300.0
STOP_S = 30.0
WATCH_S = 0.5
CALL_S = 3.0
AGAIN_S = 1.0
ROUTER = (
    "router.salt_secret=0123456789abcdef",
    "router.credit_tokens=16",
    "requests.max_attempts=12",
)
EXACT = (
    "load.dtype=float32",
    "load.entry_format=float32",
    "load.batch_invariant=true",
    "load.block_tokens=16",
)
ENGINE = (
    *EXACT,
    *POOL,
    "engine.lease_s=4",
    "cache.host_bytes=4MiB",
    "cache.min_load_tokens=0",
    "cache.break_even=false",
    "roles.decode.decode.landing_bytes=8MiB",
)
COMMON = ("registry.ttl_seconds=4", "metrics.enabled=false", "log.format=json")
TAIL_BYTES = 16 * 1024
LIVES_OF = ("router", "encoder", "prefill", "decode")


@dataclass(eq=False)
class Process:
    """One of ours, over all its lives."""

    name: str
    role: str
    port: int
    proxy: Proxy
    channel: grpc.aio.Channel
    log: Path
    """Of all its lives."""
    child: ForkedProcess | None = None
    touched: bool = False
    """A fault is being done to it, or it has not come back from one."""
    stopped: bool = False
    status: control_pb2.StatusResponse | None = None
    """The last one of this life."""
    counts: dict[str, common_pb2.PeerId | control_pb2.Conservation] = field(default_factory=dict)
    """By incarnation, as last heard."""

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.returncode is None

    async def ended(self, seconds: float) -> bool:
        """Whether the present life ends within the time."""
        assert self.child is not None
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await asyncio.wrap_future(self.child.ended)
        except TimeoutError:
            return False
        return True

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            return "\n".join(file.read().decode("utf-8", errors="replace").splitlines()[-lines:])

    async def ask(self, *, check_integrity: bool = False, timeout_s: float = CALL_S) -> control_pb2.StatusResponse:
        """Its status, not through the proxy. Raises grpc.aio.AioRpcError."""
        stub = control_pb2_grpc.ControlServiceStub(self.channel)
        return await stub.Status(control_pb2.StatusRequest(check_integrity=check_integrity), timeout=timeout_s)


class ChaosCluster:
    """`async with`; nothing stays when it ends. `problems` are ends and states that should not have been."""

    def __init__(self, folder: Path, run_dir: Path, replicas: Mapping[str, int], store: Path, clock: WallClock) -> None:
        """`folder`: the model. `replicas`: role → number. `store`: directory of the cache's store."""
        self.folder, self.run_dir, self.store, self.clock = folder, run_dir, store, clock
        self.replicas = replicas
        self.processes: dict[str, Process] = {}
        self.servers: dict[str, Server] = {}
        self.server_proxies: dict[str, Proxy] = {}
        self.problems: list[str] = []
        self.starts_repeated = 0
        self.left: list[str] = []
        """Entries of the registry after everybody has left it."""
        self._zygote = Zygote(self._environ())
        self._running = False
        """Everybody has been ready: whoever ends untouched has ended by itself."""
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ChaosCluster:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def of(self, role: str) -> list[Process]:
        return [each for each in self.processes.values() if each.role == role]

    def names(self) -> dict[str, tuple[str, ...]]:
        """Kind of process → names, as the schedule wants them."""
        found = {role: tuple(each.name for each in self.of(role)) for role in LIVES_OF if self.of(role)}
        return found | {REDIS: (REDIS,), ETCD: (ETCD,)}

    def servers_of(self, lane: str) -> list[Server]:
        """Redis, or the members of etcd."""
        return [server for name, server in self.servers.items() if name.partition("-")[0] == lane]

    def ready(self, name: str) -> bool:
        """Whether it is alive, ready, and known as such to every router that lives."""
        process = self.processes[name]
        if not process.alive or process.child is None or process.stopped:
            return False
        if process.role == "router":
            return process.status is not None and process.status.ready and self._knows_all_roles(process)
        routers = [each for each in self.of("router") if each.alive and not each.stopped]
        return bool(routers) and all((name, process.child.pid) in _members(each) for each in routers)

    def spares(self, name: str) -> bool:
        """Whether its role has another replica that is sound and left alone."""
        role = self.processes[name].role
        return any(other.name != name and not other.touched and self.ready(other.name) for other in self.of(role))

    async def spawn(self, name: str) -> None:
        """Start a process, for the first time or again."""
        process = self.processes[name]
        process.child = await asyncio.to_thread(
            self._zygote.popen, HEADRACE, self._arguments(process), environ=self._environ(), log=process.log
        )
        process.status = None

    async def _again(self, process: Process) -> None:
        """Start one that ended by itself, which is a problem; the others go on with it."""
        assert process.child is not None
        self.problems.append(f"{process.name} ended by itself ({process.child.returncode}): {process.tail(3)}")
        await asyncio.sleep(AGAIN_S)
        await self.spawn(process.name)

    async def until_ready(self, names: Sequence[str], seconds: float) -> bool:
        """Wait for them; whether they came."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(self.ready(name) for name in names):
                return True
            for name in names:
                process = self.processes[name]
                if process.alive or process.child is None:
                    continue
                if "No space left on device" in process.tail(8):
                    # A worker does not start over a store that is full; whoever keeps it running tries again.
                    self.starts_repeated += 1
                    await asyncio.sleep(AGAIN_S)
                    await self.spawn(name)
                    continue
                await self._again(process)
            await asyncio.sleep(0.1)
        return False

    async def stop(self) -> None:
        """End everything, workers after routers; whoever does not end well is a problem."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        for role in ("router", "prefill", "decode", "encoder"):
            running = [(each, each.child) for each in self.of(role) if each.child is not None and each.alive]
            for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGINT):  # the last ends the drain
                for _, child in running:
                    child.send_signal(number)
            deadline = time.monotonic() + STOP_S
            for process, child in running:
                ended = await process.ended(deadline - time.monotonic())
                if not ended or child.returncode != 0:
                    self.problems.append(f"{process.name} did not end well ({child.returncode}): {process.tail(5)}")
                child.kill()
        etcd = self.servers_of(ETCD)
        if etcd and all(member.running for member in etcd):
            self.left += await registered([member.address for member in etcd])
        await asyncio.to_thread(self._zygote.close)
        for server in self.servers.values():
            server.kill()
        for process in self.processes.values():
            await process.channel.close()
        for proxy in (*self.server_proxies.values(), *(each.proxy for each in self.processes.values())):
            await proxy.close()
        self.processes.clear()
        self.servers.clear()
        self.server_proxies.clear()

    # --- inside ------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self.run_dir.mkdir(parents=True)
        self.servers |= etcd_servers(self.run_dir)
        self.servers[REDIS] = redis_server(self.run_dir / "redis")
        for name, server in self.servers.items():
            server.start()
            proxy = self.server_proxies[name] = Proxy(server.port)
            await proxy.start()
        for role in LIVES_OF:
            for index in range(self.replicas.get(role, 0)):
                (port,) = free_ports(1)
                proxy = Proxy(port)
                await proxy.start()
                name = f"{role}-{index}"
                channel = open_channel(f"127.0.0.1:{port}", RpcSettings())
                self.processes[name] = Process(name, role, port, proxy, channel, self.run_dir / f"{name}.log")
        await asyncio.gather(*(asyncio.to_thread(wait_until_healthy, member) for member in self.servers_of(ETCD)))
        await asyncio.to_thread(self.servers[REDIS].wait_until_it_listens)
        for name in self.processes:
            await self.spawn(name)
        self._watching = asyncio.create_task(self._watch())
        if not await self.until_ready(list(self.processes), START_S):
            late = [name for name in self.processes if not self.ready(name)]
            raise RuntimeError(f"the cluster does not start: {self.problems or late}\n{self.processes[late[0]].tail()}")
        self._running = True

    def _arguments(self, process: Process) -> tuple[str, ...]:
        store = f"file://{self.store}"
        index = f"redis://{self.server_proxies[REDIS].address}/0"
        etcd = ",".join(proxy.address for name, proxy in self.server_proxies.items() if name != REDIS)
        own = {
            "router": (*ROUTER, f"index.store={store}", f"index.store_index={index}"),
            "encoder": EXACT,
        }.get(process.role, (*ENGINE, f"cache.store={store}", f"cache.index={index}"))
        sets = (
            f"replica_id={process.name}",
            f"model.folder={self.folder}",
            "registry.kind=etcd",
            f"registry.address={etcd}",
            f"listen.port={process.port}",
            f"listen.advertise={process.proxy.address}",
            f"stop.parent_pid={os.getpid()}",
            *COMMON,
            *own,
        )
        return ("serve", process.role, *(part for item in sets for part in ("--set", item)))

    def _environ(self) -> Mapping[str, str]:
        root = str(Path(__file__).resolve().parents[2])
        own = {"PYTHONPATH": root, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "UCX_NET_DEVICES": "lo"}
        return os.environ | own | self.clock.environ

    async def _watch(self) -> None:
        """Keep every process's status; L11 holds at every instant on every service."""
        while True:
            await asyncio.gather(*(self._look(each) for each in self.processes.values()))
            for process in self.processes.values():
                if process.child is not None and not process.alive and not process.touched and self._running:
                    await self._again(process)
            await asyncio.sleep(WATCH_S)

    async def _look(self, process: Process) -> None:
        child = process.child
        if child is None or not process.alive or process.stopped:
            return
        with contextlib.suppress(grpc.aio.AioRpcError):  # it may be dying or starting
            status = await process.ask()
            if process.child is not child:
                return
            process.status = status
            self.note(process, status)

    def note(self, process: Process, status: control_pb2.StatusResponse) -> None:
        """Keep its counts, and hold them against L11."""
        counts = status.requests
        process.counts[status.replica.peer.incarnation] = counts
        ended = counts.finished + counts.cancelled + counts.deadline + counts.failed
        if counts.accepted != counts.live + ended:
            self.problems.append(f"{process.name}: conservation is broken: {counts}".replace("\n", " "))

    def _knows_all_roles(self, router: Process) -> bool:
        known = {role_of(name) for name, _ in _members(router)}
        return known >= {role for role, count in self.replicas.items() if count and role != "router"}


def _members(router: Process) -> set[tuple[str, int]]:
    status = router.status
    if status is None:
        return set()
    ready = registry_pb2.REPLICA_STATE_READY
    return {(one.peer.replica_id, one.pid) for one in status.members if one.state == ready}


def role_of(name: str) -> str:
    """`prefill-1` → `prefill`."""
    return name.rpartition("-")[0] or name
