"""Real processes around a real etcd: any number of routers over the same workers.

`cli.local_cluster` has one router, which is the registry; here the registry stands apart, as in a cluster.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import headrace
from bench._ports import free_ports
from headrace.cli.child import Child, ChildSpec, address_file
from headrace.cli.client import RouterClient, replica_is_ready, replica_status
from headrace.services.runtime.errors import HeadraceError
from headrace.v1 import registry_pb2

START_SECONDS = 180.0
POLL_SECONDS = 0.05
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Member:
    """A process to start."""

    name: str
    role: str
    sets: tuple[str, ...] = ()


class EtcdCluster:
    """Started as a context manager; nothing stays when it ends. Raises RuntimeError for a start that fails."""

    def __init__(self, folder: Path, run_dir: Path, members: Sequence[Member]) -> None:
        """`folder`: the model; `run_dir`: logs, addresses and etcd's data."""
        self._folder = folder
        self._run_dir = run_dir
        self._members = list(members)
        self._registry = f"127.0.0.1:{free_ports(1)[0]}"
        self._etcd: Child | None = None
        self.children: dict[str, Child] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def address(self, name: str) -> str:
        """host:port of a process."""
        address = self.children[name].address
        assert address is not None
        return address

    def names(self, role: str) -> tuple[str, ...]:
        return tuple(member.name for member in self._members if member.role == role)

    def start(self, *members: Member) -> None:
        """Further processes. Returns when they are ready and the routers know them. Raises RuntimeError for a start
        that fails."""
        self._members += members
        for member in members:
            self._launch(member)
        self._until_ready(member.name for member in members)

    # --- inside ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        etcd = shutil.which("etcd")
        if etcd is None:
            raise RuntimeError("no etcd here; install the package etcd-server")
        self._run_dir.mkdir(parents=True, exist_ok=True)
        # The other children watch their parent; etcd does not.
        setpriv = shutil.which("setpriv")
        guard = () if setpriv is None else (setpriv, "--pdeathsig", "KILL", "--")
        command = (*guard, etcd, *_etcd_arguments(self._run_dir / "etcd-data", self._registry))
        self._etcd = Child(ChildSpec("etcd", "etcd", command, self._environ()), self._run_dir)
        for member in self._members:
            self._launch(member)
        self._until_ready(self.children)

    def _launch(self, member: Member) -> None:
        spec = ChildSpec(member.name, member.role, self._command(member), self._environ())
        self.children[member.name] = Child(spec, self._run_dir)

    def _until_ready(self, names: Iterable[str]) -> None:
        """Of these processes; each living router knows the workers among them then."""
        deadline = time.monotonic() + START_SECONDS
        children = [self.children[name] for name in names]
        ready: set[str] = set()

        def all_ready() -> bool:
            for child in children:
                if child.name not in ready and child.address is not None and replica_is_ready(child.address):
                    ready.add(child.name)
            return len(ready) == len(children)

        self._until(all_ready, deadline, "all processes to be ready", children)
        workers = {child.name for child in children if child.role != "router"}
        for router in self.names("router"):
            if self.children[router].status is None:
                address = self.address(router)
                self._until(partial(_knows, address, workers), deadline, f"{router} to know all", children)

    def _command(self, member: Member) -> tuple[str, ...]:
        sets = (
            f"replica_id={member.name}",
            f"model.folder={self._folder}",
            "registry.kind=etcd",
            f"registry.address={self._registry}",
            f"listen.address_file={address_file(self._run_dir, member.name)}",
            f"stop.parent_pid={os.getpid()}",
            "metrics.enabled=false",
            "log.format=json",
            *member.sets,
        )
        serve = (sys.executable, "-m", "headrace.cli.main", "serve", member.role)
        return serve + tuple(part for item in sets for part in ("--set", item))

    def _environ(self) -> Mapping[str, str]:
        root = str(Path(headrace.__file__).resolve().parents[1])
        return os.environ | {
            "PYTHONPATH": root,
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "UCX_NET_DEVICES": "lo",
        }

    def _until(self, done: Callable[[], bool], deadline: float, what: str, children: Sequence[Child]) -> None:
        while not done():
            dead = [child for child in children if child.status is not None]
            if dead or time.monotonic() > deadline:
                child = (dead or children)[0]
                raise RuntimeError(f"waited for {what}; the end of {child.log}:\n{child.tail()}")
            time.sleep(POLL_SECONDS)

    def _stop(self) -> None:
        for role in ("router", "prefill", "decode", "encoder"):
            children = [self.children[name] for name in self.names(role) if name in self.children]
            for number in (signal.SIGTERM, signal.SIGINT):  # the second ends the drain
                for child in children:
                    child.signal(number)
            deadline = time.monotonic() + STOP_SECONDS
            for child in children:
                child.wait(deadline - time.monotonic())
                child.kill()
        if self._etcd is not None:
            self._etcd.kill()


def _knows(address: str, workers: set[str]) -> bool:
    """Whether a router has these as ready members."""
    try:
        with RouterClient(address) as client:
            members = client.status().members
    except HeadraceError:
        return False
    return workers <= {one.peer.replica_id for one in members if one.state == registry_pb2.REPLICA_STATE_READY}


def _etcd_arguments(data: Path, address: str) -> tuple[str, ...]:
    peer = f"127.0.0.1:{free_ports(1)[0]}"
    return (
        f"--data-dir={data}",
        f"--listen-client-urls=http://{address}",
        f"--advertise-client-urls=http://{address}",
        f"--listen-peer-urls=http://{peer}",
        f"--initial-advertise-peer-urls=http://{peer}",
        f"--initial-cluster=default=http://{peer}",
        "--log-level=error",
    )


def slots_peak(address: str) -> int:
    """The most slots that a decode rank ever had booked, which it counts itself at every reservation."""
    return max(load.slots_peak for load in replica_status(address).replica.loads)


def slots_used(address: str) -> int:
    """Slots that are booked at a decode rank now."""
    return sum(load.slots_used for load in replica_status(address).replica.loads)
