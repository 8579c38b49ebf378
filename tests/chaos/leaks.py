"""What is left when all is quiet: blocks, slots, leases, index entries, descriptors, shared memory, resident memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from headrace.v1 import control_pb2, control_pb2_grpc
from tests.chaos.processes import ChaosCluster, Process
from tests.services.cluster import busy

QUIET_S = 90.0
VERIFY_S = 120.0


@dataclass(frozen=True)
class Footprint:
    """Of a process at one moment."""

    pid: int
    at: float
    rss_kib: int
    descriptors: int
    kinds: dict[str, int]
    """Of descriptors."""


def footprint(pid: int) -> Footprint:
    """Raises FileNotFoundError or ProcessLookupError once it is gone."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kinds: Counter[str] = Counter()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            kinds[_kind(os.readlink(entry.path))] += 1
        except FileNotFoundError:  # closed since
            continue
    return Footprint(pid, time.monotonic(), int(fields["VmRSS"].split()[0]), sum(kinds.values()), dict(kinds))


def _kind(target: str) -> str:
    return target.split(":", 1)[0] if not target.startswith("/") else "file"


async def quiesce(cluster: ChaosCluster, seconds: float = QUIET_S) -> list[str]:
    """Wait until every process has given everything back; what remains then is leaked."""
    deadline = time.monotonic() + seconds
    while True:
        found = [text for each in cluster.processes.values() for text in await _left(cluster, each)]
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


async def store_problems(cluster: ChaosCluster) -> list[str]:
    """Every record of the store, held against its index by a worker: what is damaged, and rows of nothing."""
    stub = control_pb2_grpc.ControlServiceStub(cluster.of("router")[0].channel)
    last = control_pb2.VerifyCacheResponse()
    try:
        async for response in stub.VerifyCache(control_pb2.VerifyCacheRequest(), timeout=VERIFY_S):
            last = response
    except grpc.aio.AioRpcError as failed:
        return [f"the store cannot be verified: {failed.code().name} {failed.details()}"]
    found = [f"the store has {len(last.bad)} damaged records: {last.bad[0]}"] if last.bad else []
    return found + ([f"the store's index has {last.dangling} rows of nothing"] if last.dangling else [])


async def _left(cluster: ChaosCluster, process: Process) -> list[str]:
    if not process.alive:
        return [f"{process.name} does not run"]
    try:
        status = await process.ask(check_integrity=True, timeout_s=20.0)
    except grpc.aio.AioRpcError as failed:
        return [f"{process.name} does not answer: {failed.code().name}"]
    cluster.note(process, status)
    problem = busy(status)
    if not status.integrity.checked:
        problem = problem or "no integrity check"
    return [f"{process.name}: {problem}".replace("\n", " ")] if problem else []
