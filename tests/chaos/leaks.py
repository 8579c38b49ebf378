"""What is left when all is quiet: blocks, slots, leases, index entries, descriptors, shared memory, resident memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from tests.chaos.processes import ChaosCluster, Process
from tests.services.cluster import busy

QUIET_S = 90.0


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
