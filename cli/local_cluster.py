"""A cluster on this machine as child processes that end with their launcher.

    with LocalCluster(ClusterSpec(folder, {"prefill": 2, "decode": 2})) as cluster:
        RouterClient(cluster.router)…

`headrace up`, examples/demo.py, the benches and the tests all use this class. The launcher itself loads no torch.
However it ends, nothing stays: a normal end drains and stops the children in order, and a launcher that is killed
takes them along, since each watches it (stop.parent_pid).
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from headrace.cli.child import Child, describe_end
from headrace.cli.client import RouterClient, replica_is_ready, replica_status
from headrace.cli.client_tls import TLS_FOLDER, ClientTls, identity
from headrace.cli.cluster_memory import WorkerMemory, plan_memory
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.exits import CliError, Exit
from headrace.cli.local_children import ChildMaker
from headrace.services.runtime.errors import HeadraceError
from headrace.v1 import control_pb2, registry_pb2

POLL_SECONDS: Final = 0.05
START_SECONDS: Final = 300.0
"""Longest start of a whole cluster; big models load for minutes."""
DRAIN_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 10.0
"""Defaults of stop.drain_seconds and stop.close_seconds, which the launcher waits for before it kills."""
HURRY: Final = signal.SIGINT
"""Ends a drain that SIGTERM began. Not SIGTERM again: a second one merges with a first that is still pending."""


class ChildFailed(CliError):
    """A child ended that should run. The message holds the tail of its log."""

    def __init__(self, child: Child, what: str) -> None:
        status = child.status
        end = "is stopped" if status is None else describe_end(status)
        super().__init__(f"{child.name} {what} ({end}); the end of {child.log}:\n{child.tail()}", Exit.FAILED)
        self.name = child.name


class LocalCluster:
    """Start with `start` or as a context manager. Not for use from several threads, but for `hurry`."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        run_dir: Path | None = None,
        start_seconds: float = START_SECONDS,
        environ: Mapping[str, str] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`run_dir` holds logs and address files; None makes a temporary one, which a clean stop removes.
        `on_change` is called about every 50 ms of a start or stop, for displays."""
        self.spec = spec
        self.children: list[Child] = []
        """The router first; empty before the start."""
        self.ready: set[str] = set()
        """Names of the children that have become ready."""
        self._own_run_dir = run_dir is None
        self._run_dir = run_dir
        self._start_seconds = start_seconds
        self._environ = dict(os.environ if environ is None else environ)
        self._operator_key = secrets.token_hex(32)
        """A router that knows tenants answers and drains for operators alone, and the launcher is one."""
        self._on_change = on_change
        self._hurry = threading.Event()
        self._client: RouterClient | None = None
        self._stopped: list[str] | None = None
        self._memory: Mapping[str, WorkerMemory] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(drain=kind is None)

    @property
    def run_dir(self) -> Path:
        """Logs and addresses of the children."""
        if self._run_dir is None:
            self._run_dir = Path(tempfile.mkdtemp(prefix="headrace-"))
        return self._run_dir

    @cached_property
    def _makes(self) -> ChildMaker:
        return ChildMaker(self.spec, self.run_dir, self._environ, self._operator_key)

    @property
    def router(self) -> str:
        """host:port of the router. Raises CliError before the start."""
        address = self.children[0].address if self.children else None
        if address is None:
            raise CliError("the cluster has not started")
        return address

    @property
    def client(self) -> RouterClient:
        """A client of the router with an operator's key, closed with the cluster."""
        if self._client is None:
            self._client = RouterClient(self.router, api_key=self._operator_key, tls=self.tls)
        return self._client

    @property
    def tls(self) -> ClientTls | None:
        """The launcher's certificate; None: plain text."""
        return identity(self.run_dir / TLS_FOLDER) if self.spec.tls else None

    def child(self, name: str) -> Child:
        """A child by its replica name, e.g. `decode-0`."""
        return next(child for child in self.children if child.name == name)

    def start(self) -> None:
        """Start all children and wait until each is ready and the router knows it.

        Raises ChildFailed when one ends meanwhile, CliError when the time is over; nothing is left running then.
        """
        deadline = time.monotonic() + self._start_seconds
        try:
            self._start(deadline)
        except BaseException:
            self._close(keep_logs=True)
            raise

    def _start(self, deadline: float) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._memory = memory = plan_memory(self.spec)
        self._makes.credentials()
        self._spawn("router-0", (), memory)
        self._until(lambda: self.children[0].address is not None, deadline, "the router to listen")
        for name in self.spec.names[1:]:
            self._spawn(name, (self._registry_set(),), memory)
        self._until(self._all_ready, deadline, "all replicas to be ready")
        self._until(self._all_members, deadline, "the router to know all replicas")

    def restart(self, name: str) -> None:
        """End one child as `stop` does (it drains, then hands over), start it anew and wait until the router knows all
        replicas as ready. The router comes back at its address.

        Raises ChildFailed when a child does not end or start well, CliError when the start takes too long.
        """
        child = self.child(name)
        self.ready.discard(name)
        drain_s = self._stop_seconds("drain_seconds", DRAIN_SECONDS)
        if self._end([child], drain_s, self._stop_seconds("close_seconds", CLOSE_SECONDS) + 2.0):
            raise ChildFailed(child, "did not end well for its restart")
        wiring = f"listen.port={self.router.rpartition(':')[2]}" if child.role == "router" else self._registry_set()
        self._spawn(name, (wiring,), self._memory)
        self.settle(self._start_seconds)

    def settle(self, seconds: float) -> None:
        """Wait until all children are ready and known to the router in their present lives; a worker that somebody has
        drained is taken as it is. Raises as `restart`."""
        deadline = time.monotonic() + seconds
        self._until(self._all_ready, deadline, "all replicas to be ready")
        self._until(partial(self._all_members, drained=True), deadline, "the router to know all replicas")

    def _registry_set(self) -> str:
        return f"registry.address={self.router}"

    def _spawn(self, name: str, wiring: tuple[str, ...], memory: Mapping[str, WorkerMemory]) -> None:
        child = self._makes.child(name, wiring, memory.get(name))
        former = next((index for index, one in enumerate(self.children) if one.name == name), None)
        if former is None:
            self.children.append(Child(child, self.run_dir))
        else:
            self.children[former] = Child(child, self.run_dir, restarted=True)
        self._on_change()

    def _all_ready(self) -> bool:
        for child in self.children:
            address = child.address
            if child.name not in self.ready and address is not None and replica_is_ready(address, tls=self.tls):
                self.ready.add(child.name)
        return len(self.ready) == len(self.children)

    def _all_members(self, *, drained: bool = False) -> bool:
        try:
            members = self.client.status().members
        except HeadraceError:
            return False
        ready = {(one.peer.replica_id, one.pid) for one in members if one.state == registry_pb2.REPLICA_STATE_READY}
        missing = [child for child in self.children[1:] if (child.name, child.pid) not in ready]
        return all(drained and self._is_drained(child) for child in missing)

    def _is_drained(self, child: Child) -> bool:
        """By its own word: a router that came after the drain does not know it."""
        try:
            status = replica_status(child.address or "", tls=self.tls)
        except HeadraceError:
            return False
        return status.replica.state == registry_pb2.REPLICA_STATE_DRAINING

    def _until(self, done: Callable[[], bool], deadline: float, what: str) -> None:
        while not done():
            dead = self.dead()
            if dead:
                raise ChildFailed(dead[0], "ended while the cluster was starting")
            if time.monotonic() > deadline:
                late = [child for child in self.children if child.name not in self.ready] or self.children
                raise CliError(
                    f"waited {self._start_seconds:.0f} s for {what}; the end of {late[0].log}:\n{late[0].tail()}",
                    Exit.FAILED,
                )
            self._on_change()
            time.sleep(POLL_SECONDS)

    def dead(self) -> list[Child]:
        """Children that have ended."""
        return [child for child in self.children if child.status is not None]

    def check(self) -> None:
        """Raises ChildFailed when a child has ended."""
        if dead := self.dead():
            raise ChildFailed(dead[0], "ended")

    def status(self, *, check_integrity: bool = False) -> control_pb2.StatusResponse:
        """The router's view. Raises HeadraceError when it does not answer."""
        return self.client.status(check_integrity=check_integrity)

    def hurry(self) -> None:
        """End a running drain; may be called from a signal handler or another thread."""
        self._hurry.set()

    def stop(self, *, drain: bool = True) -> list[str]:
        """End all children; returns the names of those that did not end by themselves or ended with a failure.

        First the router refuses new requests and finishes what runs, then the workers leave, then the router. A child
        that does not end in its time is killed. A second call does nothing and answers the same.
        """
        if self._stopped is not None:
            return self._stopped
        drain_s = self._stop_seconds("drain_seconds", DRAIN_SECONDS) if drain else 0.0
        close_s = self._stop_seconds("close_seconds", CLOSE_SECONDS) + 2.0
        if drain and self.children and self.children[0].status is None and self.ready:
            self._drain_router(drain_s)
        bad: list[str] = []
        for group in (self.children[1:], self.children[:1]):
            bad += self._end(group, drain_s, close_s)
        self._close(keep_logs=bool(bad))
        self._stopped = bad
        return bad

    def _stop_seconds(self, name: str, default: float) -> float:
        """The children's setting, where it was given as a flag to all; a file's value may cut the wait short."""
        for item in reversed(self.spec.sets):
            key, _, value = item.partition("=")
            if key == f"stop.{name}":
                return float(value)
        return default

    def _drain_router(self, seconds: float) -> None:
        call = self.client.drain(seconds)
        deadline = time.monotonic() + seconds + 1.0
        while not call.done() and not self._hurry.is_set() and time.monotonic() < deadline:
            if self.children[0].status is not None:
                break
            self._on_change()
            time.sleep(POLL_SECONDS)
        call.cancel()

    def _end(self, group: list[Child], drain_s: float, close_s: float) -> list[str]:
        alive = [child for child in group if child.status is None]
        bad = [child.name for child in group if child not in alive]
        for child in alive:
            child.signal(signal.SIGTERM)
        hurried = drain_s == 0
        if hurried:
            for child in alive:
                child.signal(HURRY)
        deadline = time.monotonic() + drain_s + close_s
        while any(child.status is None for child in alive) and time.monotonic() < deadline:
            if self._hurry.is_set() and not hurried:
                hurried, deadline = True, time.monotonic() + close_s
                for child in alive:
                    child.signal(HURRY)
            self._on_change()
            time.sleep(POLL_SECONDS)
        bad += [child.name for child in alive if child.status != 0]
        for child in alive:
            child.kill()
        return bad

    def _close(self, *, keep_logs: bool) -> None:
        for child in self.children:
            child.kill()
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._own_run_dir and self._run_dir is not None and not keep_logs:
            shutil.rmtree(self._run_dir, ignore_errors=True)
