"""A real cluster of the tiny model under load while its processes are stopped, killed, and made to lie.

Two prefill and two decode workers, and a third decode worker that lies (mock_reports.py). Faults are real: SIGKILL, and
SIGSTOP in a duty cycle, which is a worker that gets a fifth of its time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

import grpc.aio

from bench._progress import Advance, Phases
from bench.router_speed_harness.clients import FrontDoor, Seen, channel
from headrace.cli.client import replica_is_ready
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_children import SECRET_FILE
from headrace.cli.local_cluster import LocalCluster
from headrace.v1 import common_pb2, control_pb2

CLIENTS = 4
PROMPT, TOKENS = 24, 4
STOPPED_S, RUNNING_S = 0.2, 0.05
START_S = 120.0
LIAR = "Mock-decode-liar"


@dataclass(frozen=True)
class Replica:
    """What one replica had of a phase."""

    share: float
    ttft_p50_ms: float
    ttft_p99_ms: float


@dataclass(frozen=True)
class Phase:
    """A closed loop of requests during one state of the cluster."""

    name: str
    requests: int
    ended_well: int
    ended_with_error: int
    """A typed error in the stream or as a status. Whatever ends neither way would be a hang; there is none."""
    errors: tuple[str, ...]
    """Their different texts."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    decode: dict[str, Replica] = field(default_factory=dict)
    prefill: dict[str, Replica] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All phases, and what is left afterwards."""

    phases: tuple[Phase, ...]
    live_at_the_end: int
    """Requests that the router still counts: none may be (L11)."""
    problems: tuple[str, ...]
    """Of the router's integrity check."""


def measure(folder: Path, requests: int, lie: str, progress: Phases) -> Report:
    """One cluster through all states."""
    sets = ("registry.ttl_seconds=2", "admission.max_running=64")
    spec = ClusterSpec(folder, {"prefill": 2, "decode": 2}, sets=sets)
    phases: list[Phase] = []

    def load(name: str) -> None:
        with progress.phase(name, requests) as told:
            seen = asyncio.run(_load(cluster.router, requests, told))
        phases.append(_phase(name, seen))

    with LocalCluster(spec) as cluster:
        load("before")
        with _liar(cluster, folder, lie) as process:
            load(f"one of three decode workers reports {lie}")
            threading.Timer(0.5, process.kill).start()
            load("it is killed")
        with _slow(cluster.child("decode-1").pid):
            load("decode-1 gets a fifth of its time")
        load("healthy again")
        threading.Timer(0.5, cluster.child("prefill-1").signal, (signal.SIGKILL,)).start()
        load("prefill-1 is killed")
        status = _at_rest(cluster)
    return Report(tuple(phases), status.requests.live, tuple(status.integrity.problems))


async def _load(address: str, requests: int, told: Advance) -> list[Seen]:
    """CLIENTS in flight; a failed request is a result."""
    numbers = iter(range(requests))
    seen: list[Seen] = []

    async def client(door: FrontDoor) -> None:
        for number in numbers:
            prompt = [3 + (7 * number + 13 * place + os.getpid()) % 200 for place in range(PROMPT)]
            sent = Seen(0.0)
            try:
                sent = await door.send(prompt, TOKENS, report=True)
            except grpc.aio.AioRpcError as error:
                sent.error = f"{error.code().name}: {error.details()}"
            seen.append(sent)
            told()

    async with channel(address) as opened:
        await asyncio.gather(*(client(FrontDoor(opened)) for _ in range(CLIENTS)))
    return seen


def _phase(name: str, seen: Sequence[Seen]) -> Phase:
    well = [one for one in seen if not one.error and one.arrivals]
    first = sorted(one.ttft_s for one in well)
    return Phase(
        name=name,
        requests=len(seen),
        ended_well=len(well),
        ended_with_error=len(seen) - len(well),
        errors=tuple(sorted({one.error[:160] for one in seen if one.error})),
        ttft_p50_ms=_ms(first, 0.5),
        ttft_p99_ms=_ms(first, 0.99),
        decode=_by_replica(well, common_pb2.ROLE_DECODE),
        prefill=_by_replica(well, common_pb2.ROLE_PREFILL),
    )


def _by_replica(seen: Sequence[Seen], role: int) -> dict[str, Replica]:
    """Of requests that ended well, by the replica of the last attempt."""
    names = Counter(one.replicas.get(role, "?") for one in seen)
    found = {}
    for name, count in sorted(names.items()):
        first = sorted(one.ttft_s for one in seen if one.replicas.get(role, "?") == name)
        found[name] = Replica(round(count / len(seen), 3), _ms(first, 0.5), _ms(first, 0.99))
    return found


def _ms(ordered: Sequence[float], share: float) -> float:
    if not ordered:
        return 0.0
    value = statistics.median(ordered) if share == 0.5 else ordered[int(share * (len(ordered) - 1))]
    return round(1e3 * value, 1)


@contextmanager
def _liar(cluster: LocalCluster, folder: Path, lie: str) -> Iterator[subprocess.Popen[bytes]]:
    """A third decode worker; a real one but for its reports."""
    address_file = cluster.run_dir / f"{LIAR}.address"
    sets = [
        f"replica_id={LIAR}",
        f"model.folder={folder}",
        f"model.name={cluster.spec.served_name}",
        f"registry.address={cluster.router}",
        "registry.ttl_seconds=2",
        f"listen.address_file={address_file}",
        f"stop.parent_pid={os.getpid()}",
        "engine.threads=1",
        f"engine.kv_bytes={16 << 20}",
        f"engine.spill_bytes={16 << 20}",
        f"decode.landing_bytes={16 << 20}",
        "load.device=cpu",
        f"transfer.secret_file={cluster.run_dir / SECRET_FILE}",
    ]
    command = [sys.executable, "-m", "bench.load_faults_harness.mock_reports", "decode", "--lie", lie]
    for item in sets:
        command += ["--set", item]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "lo")}
    log = cluster.run_dir / f"{LIAR}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        deadline = monotonic() + START_S
        while not (address_file.is_file() and replica_is_ready(address_file.read_text().strip())):
            if process.poll() is not None or monotonic() > deadline:
                raise RuntimeError(f"{LIAR} did not become ready: {log.read_text()[-2000:]}")
            sleep(0.1)
        while LIAR not in {one.peer.replica_id for one in cluster.status().members}:
            if monotonic() > deadline:
                raise RuntimeError(f"the router does not know {LIAR}")
            sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def _slow(pid: int) -> Iterator[None]:
    """Stopped four fifths of the time, on a thread, for the block."""
    over = threading.Event()

    def cycle() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            over.wait(RUNNING_S)

    thread = threading.Thread(target=cycle, name="slow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.kill(pid, signal.SIGCONT)


def _at_rest(cluster: LocalCluster) -> control_pb2.StatusResponse:
    """The router's state once nothing is live there, or after a while."""
    deadline = monotonic() + 15.0
    while True:
        status = cluster.status(check_integrity=True)
        if (not status.requests.live and not status.integrity.problems) or monotonic() > deadline:
            return status
        sleep(0.2)
