"""etcd of three members, free ports, and what is left in the registry."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from bench._ports import free_ports
from bench.tier_harness.processes import Server
from headrace.services.runtime.registry.etcd import EtcdRegistry
from headrace.services.runtime.settings import RegistrySettings, RpcSettings

EXPIRY_TRIES = 60
MEMBERS = 3
"""Of etcd."""
HEALTHY_S = 120.0


async def registered(etcd: Sequence[str]) -> list[str]:
    """Members that the registry has, once those that were killed had time to expire."""
    registry, members = EtcdRegistry(etcd, RegistrySettings().prefix, RpcSettings()), []
    try:
        for _ in range(EXPIRY_TRIES):
            members = [each.id for each in await registry.members()]
            if not members:
                break
            await asyncio.sleep(1.0)
    finally:
        await registry.close()
    return [f"{name} stays in the registry" for name in members]


def etcd_servers(run_dir: Path) -> dict[str, Server]:
    """The members of one etcd by name, not started. Any two of them go on without the third."""
    found = shutil.which("etcd")
    if found is None:
        raise RuntimeError("no etcd here; install the package etcd-server")
    ports_of = {f"etcd-{index}": tuple(free_ports(2)) for index in range(MEMBERS)}
    cluster = ",".join(f"{name}=http://127.0.0.1:{peer}" for name, (_, peer) in ports_of.items())
    servers = {}
    for name, (port, peer_port) in ports_of.items():
        client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
        options = {
            "name": name,
            "data-dir": run_dir / f"{name}-data",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": cluster,
            "log-level": "error",
            # A busy machine elects no leader for its being late; leases are granted for 1.5 times this at least.
            "heartbeat-interval": 200,
            "election-timeout": 2000,
        }
        command = [*_guard(), found, *(f"--{option}={value}" for option, value in options.items())]
        servers[name] = Server(command, port, run_dir / f"{name}.log")
    return servers


def wait_until_healthy(etcd: Server) -> None:
    """Until a member has caught up and its cluster has a leader. Raises RuntimeError."""
    etcd.wait_until_it_listens()
    deadline = time.monotonic() + HEALTHY_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://{etcd.address}/health", timeout=5.0) as answer:
                if json.load(answer)["health"] == "true":
                    return
        except OSError:  # 503, or it does not answer yet
            pass
        time.sleep(0.05)
    raise RuntimeError(f"the etcd at {etcd.address} is not healthy: {etcd.log.read_text()[-2000:]}")


def _guard() -> list[str]:
    """Before a command: the process ends with the harness, whatever ends that."""
    setpriv = shutil.which("setpriv")
    return [] if setpriv is None else [setpriv, "--pdeathsig", "KILL", "--"]
