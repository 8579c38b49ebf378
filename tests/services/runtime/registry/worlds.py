"""Both registries behind one face, so that one suite tests both: start, open a client, cut its wire, restart."""

from __future__ import annotations

import abc
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from dataclasses import fields
from pathlib import Path

from bench._ports import free_ports
from headrace.services.runtime.health import Health
from headrace.services.runtime.ids import new_incarnation
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.registry.base import Capacity, Event, Registry, RegistryUnavailableError, Replica, Role
from headrace.services.runtime.registry.embedded import EmbeddedRegistry
from headrace.services.runtime.registry.etcd import EtcdRegistry
from headrace.services.runtime.registry.remote import RemoteRegistry
from headrace.services.runtime.registry.service import RegistryServicer
from headrace.services.runtime.server import ServiceServer
from headrace.services.runtime.settings import ListenSettings, RpcSettings
from headrace.v1 import registry_pb2, registry_pb2_grpc

PATIENCE = 60.0
"""Seconds that a bounded wait may take on a busy machine; nothing is asserted about how long it did."""
RPC = RpcSettings()


class Proxy:
    """A TCP relay that can be cut, to interrupt a client without touching the server."""

    def __init__(self) -> None:
        self._target = ("", 0)
        self._server: asyncio.Server | None = None
        self._wires: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        (self.port,) = free_ports(1)

    async def start(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for wire in self._wires:
            wire.transport.abort()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._wires.add(sink)
            task = asyncio.create_task(self._relay(source, sink))
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)

    async def _relay(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except OSError:
            return
        finally:
            self._wires.discard(sink)
            sink.transport.abort()


class World(abc.ABC):
    """One running registry. `ttl` is the shortest lease that it keeps."""

    ttl: float

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.proxy = Proxy()
        self._clients: list[Registry] = []
        self._holders: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        await self.up()
        await self.proxy.start("127.0.0.1", self.port)

    async def stop(self) -> None:
        for holder in self._holders:
            if holder.returncode is None:
                holder.kill()
            await holder.wait()
        for client in self._clients:
            await client.close()
        await self.proxy.cut()
        await self.down()

    def client(self, *, through_proxy: bool = False) -> Registry:
        client = self.connect(f"127.0.0.1:{self.proxy.port if through_proxy else self.port}")
        self._clients.append(client)
        return client

    async def holder(self, identifier: str) -> asyncio.subprocess.Process:
        """Another process that keeps `identifier` registered; returns when it is."""
        script = str(Path(__file__).parent / "holder.py")
        arguments = [*self.holder_arguments(), identifier, str(self.ttl), str(os.getpid())]
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-P", script, *arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._holders.append(child)
        assert child.stdout is not None
        assert await child.stdout.readline() == b"registered\n"
        return child

    @abc.abstractmethod
    async def up(self) -> None: ...

    @abc.abstractmethod
    async def down(self) -> None: ...

    @abc.abstractmethod
    def connect(self, address: str) -> Registry: ...

    @abc.abstractmethod
    def holder_arguments(self) -> list[str]: ...

    @abc.abstractmethod
    async def forget_history(self) -> None:
        """Drop what the registry keeps of the past."""


class EmbeddedWorld(World):
    ttl = 1.0

    async def up(self) -> None:
        self.registry = EmbeddedRegistry()
        self.server = ServiceServer(ListenSettings(port=self.port), RPC, Metrics(), Health())
        self.server.add(
            registry_pb2_grpc.add_RegistryServiceServicer_to_server,
            RegistryServicer(self.registry.table),
            registry_pb2.DESCRIPTOR.services_by_name["RegistryService"],
        )
        await self.server.start()

    async def down(self) -> None:
        await self.server.stop(0)
        await self.registry.close()

    def connect(self, address: str) -> Registry:
        return RemoteRegistry(address, RPC)

    def holder_arguments(self) -> list[str]:
        return ["embedded", f"127.0.0.1:{self.port}"]

    async def forget_history(self) -> None:
        """It keeps none."""


class EtcdWorld(World):
    ttl = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.mkdtemp(prefix="headrace-etcd-")
        (self._peer_port,) = free_ports(1)
        self._process: asyncio.subprocess.Process | None = None

    async def up(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.port, self._peer_port))
        flags = {
            "data-dir": self._folder,
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            # The shortest lease is 1.5 election timeouts; the default would make every expiry take 2 s.
            "heartbeat-interval": "20",
            "election-timeout": "200",
            "log-level": "error",
        }
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        self._process = await asyncio.create_subprocess_exec(
            "etcd", *arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        probe = self.connect(f"127.0.0.1:{self.port}")

        async def answers() -> bool:
            try:
                await probe.members()
            except RegistryUnavailableError:
                return False
            return True

        await eventually(answers)
        await probe.close()

    async def down(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        await self._process.wait()

    async def stop(self) -> None:
        await super().stop()
        shutil.rmtree(self._folder)

    def connect(self, address: str) -> Registry:
        return EtcdRegistry([address], "/test/", RPC)

    def holder_arguments(self) -> list[str]:
        return ["etcd", f"127.0.0.1:{self.port}"]

    async def forget_history(self) -> None:
        registry = self.connect(f"127.0.0.1:{self.port}")
        assert isinstance(registry, EtcdRegistry)
        _, revision = await registry.client.read_prefix(b"/test/")
        await registry.client.compact(revision)
        await registry.close()


async def eventually(holds: Callable[[], object]) -> None:
    """Ask `holds` (plain or async) again until it is true; fails after PATIENCE."""
    async with asyncio.timeout(PATIENCE):
        while True:
            answer = holds()
            if await answer if asyncio.iscoroutine(answer) else answer:
                return
            await asyncio.sleep(0.02)


async def take(watch: AsyncGenerator[Event, None], count: int) -> list[tuple[str, str, str]]:
    """The next `count` events as (kind, id, state)."""
    async with asyncio.timeout(PATIENCE):
        events = [await anext(watch) for _ in range(count)]
    return [(type(event).__name__, event.replica.id, event.replica.state.value) for event in events]


def replica(
    identifier: str,
    role: Role = Role.DECODE,
    incarnation: str | None = None,
    layout: bytes = b"L",
    model: bytes = b"M",
    model_name: str = "m",
) -> Replica:
    engine = role is not Role.ROUTER
    return Replica(
        id=identifier,
        incarnation=incarnation or new_incarnation(),
        role=role,
        data_centre="dc",
        host="h",
        endpoint="127.0.0.1:1",
        model_name=model_name if engine else "",
        layout_fp=layout * 32 if engine and role is not Role.ENCODER else b"",
        model_fp=model * 32 if engine else b"",
        capacity=Capacity(*range(1, 1 + len(fields(Capacity)))),
    )
