"""A worker with a host tier open to its peers, but no model: `Child` starts this file as a process and calls methods in
it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from headrace.kvcache.entries import EntryInfo, EntryKind, GetResult, Loaded, RetentionClass, payload_digest
from headrace.kvcache.host.arena import arena_shape
from headrace.kvcache.host.leases import LeaseStats
from headrace.kvcache.host.peers import PeerStats
from headrace.kvcache.host.tier import HostTier
from headrace.kvcache.keys import Key
from headrace.kvcache.memory import buffer_of, host_slabs
from headrace.kvcache.transfer.base import TransferSettings
from headrace.kvcache.transfer.loop import give_way
from headrace.kvcache.transfer.nixl import NixlTransferEngine
from headrace.services.runtime.health import Health
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.registry.base import Rank, Replica, Role, State
from headrace.services.runtime.registry.embedded import EmbeddedRegistry
from headrace.services.runtime.server import ServiceServer
from headrace.services.runtime.settings import ListenSettings, RpcSettings
from headrace.services.worker.channels import Channels
from headrace.services.worker.signing import UNSIGNED
from headrace.services.worker.tier.peer_wire import Reader
from headrace.services.worker.tier.peers import HostPeers
from headrace.services.worker.transfer_wire import agent_to_wire
from headrace.v1 import common_pb2

LAYOUT, MODEL = bytes(range(32)), bytes(range(32, 64))
BLOCK, SNAPSHOT = 50_000, 400_000
SLABS = 8


def key_of(name: str) -> Key:
    return hashlib.sha256(name.encode()).digest()


def payload_of(name: str, size: int = BLOCK) -> bytes:
    return (key_of(name) * (size // 32 + 1))[:size]


def info_of(name: str) -> EntryInfo:
    """Names that begin with `s` are snapshots."""
    kind = EntryKind.SNAPSHOT if name.startswith("s") else EntryKind.BLOCK
    size = SNAPSHOT if kind is EntryKind.SNAPSHOT else BLOCK
    digest = payload_digest(payload_of(name, size))
    return EntryInfo(
        key_of(name), kind, LAYOUT, key_of("parent " + name), 128, size, digest, RetentionClass.AGENT, bytes(16)
    )


class Worker:
    """In this process, on the running loop."""

    def __init__(self, incarnation: str, transports: frozenset[str], **more: Any) -> None:
        """more: of HostPeers; `gate` stands between two polls of the transfer thread."""
        gate = more.pop("gate", give_way)
        self.incarnation = incarnation
        self.engine = NixlTransferEngine(
            incarnation=incarnation,
            layout_fingerprint=LAYOUT,
            model_fingerprint=MODEL,
            # One entry a wire request, one at a time, so that a copy can be stopped between two of its entries.
            settings=TransferSettings(allowed_transports=transports, batch_bytes=1, window=1),
            yield_cpu=gate,
        )
        shape = arena_shape(SLABS * SNAPSHOT + (1 << 16), BLOCK, SNAPSHOT)
        memory = host_slabs(shape.slabs, shape.slab_bytes)
        self.tier = HostTier(buffer_of(memory), shape)
        self.peer = common_pb2.PeerId(replica_id=f"replica {incarnation[-2:]}", incarnation=incarnation)
        self.model = common_pb2.ModelIdentity(model_fingerprint=MODEL, layout_fingerprint=LAYOUT)
        own = Reader(self.peer, self.model, "local", "here", UNSIGNED)
        self.channels = Channels(RpcSettings())
        self.peers = HostPeers(
            self.tier,
            memory,
            own,
            self.engine,
            self.channels,
            buffer_bytes=4 * SNAPSHOT + (1 << 16),
            **({"max_leased_bytes": 4 * SNAPSHOT} | more),
        )
        self.registry = EmbeddedRegistry()
        self.server = ServiceServer(
            ListenSettings(), RpcSettings(), Metrics(role="prefill", replica=self.peer.replica_id, model="m"), Health()
        )
        self.server.add(*self.peers.service)
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.server.start()
        self.tasks = [asyncio.ensure_future(task) for task in self.peers.tasks(self.registry)]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.channels.close()
        await self.server.stop(0)
        await asyncio.to_thread(self.engine.close, 1.0)

    def replica(self) -> Replica:
        agent = agent_to_wire(self.engine.describe(), self.peer.replica_id, self.model, UNSIGNED)
        return Replica(
            id=self.peer.replica_id,
            incarnation=self.incarnation,
            role=Role.PREFILL,
            data_centre="local",
            host="here",
            endpoint=self.server.address,
            state=State.READY,
            model_name="m",
            model_fp=MODEL,
            layout_fp=LAYOUT,
            ranks=(Rank(0, "cpu", agent.SerializeToString()),),
        )

    async def know(self, *replicas: Replica) -> None:
        """As the registry would tell."""
        for replica in replicas:
            await self.registry.register(replica, 600.0)
        expected = {replica.incarnation for replica in replicas}
        while not expected <= set(self.peers.wire.candidates()):  # noqa: ASYNC110 - bounded by the test's timeout
            await asyncio.sleep(0.001)

    def put(self, *names: str) -> None:
        for name in names:
            info = info_of(name)
            assert self.tier.put(info, payload_of(name, info.length))

    def forget(self) -> None:
        self.tier.clear()

    def get(self, names: list[str], seconds: float) -> list[str]:
        """Blocks. `ok` for right bytes, or the cause of the miss."""
        deadline = time.monotonic() + seconds
        results = self.peers.source.get_many([key_of(name) for name in names], deadline)
        return [_judge(name, result) for name, result in zip(names, results, strict=True)]

    def lookup(self, names: list[str], seconds: float) -> list[bool]:
        return list(self.peers.source.lookup([key_of(name) for name in names], time.monotonic() + seconds))

    def lease_stats(self) -> LeaseStats:
        return self.peers.leases.stats()

    def peer_stats(self) -> PeerStats:
        return self.peers.source.stats()

    def idle(self) -> bool:
        """L11: nothing is pinned, leased, quarantined or on the wire."""
        stats = self.peers.source.stats()
        return (
            self.tier.integrity().idle
            and not self.peers.problems()
            and not (stats.units_in_use or stats.units_quarantined or self.lease_stats().live)
            and self.engine.stats().idle
        )


def _judge(name: str, result: GetResult) -> str:
    if not isinstance(result, Loaded):
        return result.value
    info = info_of(name)
    right = result.info == info and bytes(result.payload) == payload_of(name, info.length)
    result.release()
    return "ok" if right else "WRONG"


class Gate:
    """Once armed, the transfer thread tells the test between two polls, and waits to be let through."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._armed = False

    def arm(self) -> None:
        self._armed = True

    def __call__(self) -> None:
        if self._armed:
            self._armed = False
            self._connection.send("between two polls")
            self._connection.recv()
        give_way()


class Child:
    """A worker in a process of its own, as its test sees it. ``call(method, …)`` runs it there."""

    def __init__(self) -> None:
        self.incarnation = ""
        self.replica: Replica
        self._calls, theirs = Pipe()
        self.gate, their_gate = Pipe()
        fds = (theirs.fileno(), their_gate.fileno())
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *map(str, fds)], pass_fds=fds, env=environment, start_new_session=True
        )
        theirs.close()
        their_gate.close()

    def start(self, incarnation: str, transports: frozenset[str], **more: Any) -> None:
        """A fresh worker in the process: another life as far as peers can tell. Starting a process costs seconds."""
        self.incarnation = incarnation
        self.replica = self.call("start", incarnation, transports, more)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, method: str, *arguments: object) -> Any:
        self.send(method, *arguments)
        return self.receive()

    def send(self, *message: object) -> None:
        self._calls.send(message)

    def receive(self, timeout_s: float = 60.0) -> Any:
        assert self._calls.poll(timeout_s), "the worker process does not answer"
        ok, value = self._calls.recv()
        assert ok, value
        return value

    def stop(self) -> None:
        """SIGSTOP, and wait until it has."""
        os.kill(self._process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        deadline = time.monotonic() + 30
        while stat.read_text(encoding="ascii").rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=60)

    def close(self) -> None:
        self.kill()
        self._calls.close()
        self.gate.close()


class _Host:
    """The child's side: one worker after another on its loop."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._loop = asyncio.get_running_loop()
        self._worker: Worker | None = None

    async def start(self, incarnation: str, transports: frozenset[str], more: dict[str, Any]) -> Replica:
        await self.end()
        self._worker = Worker(incarnation, transports, gate=self._gate, **more)
        await self._worker.start()
        return self._worker.replica()

    async def end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()

    def run(self, method: str, arguments: list[Any]) -> Any:
        """On the listening thread."""
        if method == "arm":
            return self._gate.arm()
        target = getattr(self if method in ("start", "end") else self._worker, method)
        if asyncio.iscoroutinefunction(target):
            return asyncio.run_coroutine_threadsafe(target(*arguments), self._loop).result(50)
        return target(*arguments)


async def _serve(calls: Connection, gate: Gate) -> None:
    host = _Host(gate)
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def listen() -> None:
        while True:
            try:
                method, *arguments = calls.recv()
            except EOFError:
                break
            try:
                calls.send((True, host.run(method, arguments)))
            except Exception as error:  # noqa: BLE001  the test raises it
                calls.send((False, repr(error)))
        loop.call_soon_threadsafe(over.set_result, None)

    threading.Thread(target=listen, daemon=True).start()
    await over


def main() -> None:
    calls, gate = (Connection(int(fd)) for fd in sys.argv[1:3])
    asyncio.run(_serve(calls, Gate(gate)))


if __name__ == "__main__":
    main()
