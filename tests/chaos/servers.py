"""etcd, free ports, and what is left in the registry."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from bench.tier_harness.processes import Server
from headrace.services.runtime.registry.etcd import EtcdRegistry
from headrace.services.runtime.settings import RegistrySettings, RpcSettings

EXPIRY_TRIES = 60


async def registered(etcd: str) -> list[str]:
    """Members that the registry has, once those that were killed had time to expire."""
    registry, members = EtcdRegistry([etcd], RegistrySettings().prefix, RpcSettings()), []
    try:
        for _ in range(EXPIRY_TRIES):
            members = [each.id for each in await registry.members()]
            if not members:
                break
            await asyncio.sleep(1.0)
    finally:
        await registry.close()
    return [f"{name} stays in the registry" for name in members]


def etcd_server(run_dir: Path, port: int, peer_port: int) -> Server:
    found = shutil.which("etcd")
    if found is None:
        raise RuntimeError("no etcd here; install the package etcd-server")
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    options = {
        "data-dir": run_dir / "etcd-data",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
        "log-level": "error",
    }
    command = [*_guard(), found, *(f"--{name}={value}" for name, value in options.items())]
    return Server(command, port, run_dir / "etcd.log")


def _guard() -> list[str]:
    """Before a command: the process ends with the harness, whatever ends that."""
    setpriv = shutil.which("setpriv")
    return [] if setpriv is None else [setpriv, "--pdeathsig", "KILL", "--"]


def ports() -> Iterator[int]:
    """Free ports below those that outgoing connections take, so that a killed process finds its own again."""
    port = random.Random(os.getpid()).randrange(12_000, 30_000)
    while True:
        port = port + 1 if port < 32_000 else 12_000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port
