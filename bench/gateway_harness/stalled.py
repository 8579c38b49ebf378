"""Readers that stop reading: what they leave of the others' speed, and what they cost the gateway."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from statistics import median

import psutil

from bench._report import Scalar
from bench.gateway_harness.clients import One, request_bytes, together

ENDLESS_TOKENS = 1 << 30
RECEIVE_BYTES = 4096
"""Of a stalled reader's socket, so that little goes into the kernel before it stalls."""
QUIET_S, QUIET_CPU_S = 1.0, 0.02
"""Streams stand still when the gateway computes no more than this for so long."""
STALL_S = 120.0


@dataclass(frozen=True)
class Others:
    """What the streams that are read see."""

    tokens_per_s: float
    """Of streams that are sent as fast as they are taken, together."""
    cpu_us_per_token: float
    """The gateway's."""
    first_ms: float
    """Of paced streams, median."""
    gap_p99_ms: float
    """Of paced streams, from token to token."""


@dataclass(frozen=True)
class Load:
    """Streams that are read."""

    one: One
    streams: int
    fast: str
    fast_tokens: int
    """Of each."""
    paced: str
    paced_tokens: int


def cpu_s(process: psutil.Process) -> float:
    """Time that a process has computed for so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def others(load: Load, gateway: psutil.Process) -> Others:
    """Measure them once."""
    before = cpu_s(gateway)
    fast = await together(load.one, load.fast, load.streams, load.fast_tokens)
    spent = cpu_s(gateway) - before
    paced = await together(load.one, load.paced, load.streams, load.paced_tokens)
    tokens = load.streams * load.fast_tokens
    return Others(fast.tokens_per_s, 1e6 * spent / tokens, paced.first_ms, paced.gap_p99_ms)


def rss_mb(process: psutil.Process) -> float:
    """Resident memory."""
    return round(float(process.memory_info().rss) / 1e6, 1)


@asynccontextmanager
async def stalled(host: str, port: int, model: str, readers: int, gateway: psutil.Process) -> AsyncIterator[None]:
    """Within it that many endless streams stand still, unread. Raises TimeoutError when they do not come to that."""
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(readers):
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            raw.setblocking(False)
            await asyncio.get_running_loop().sock_connect(raw, (host, port))
            reader, writer = await asyncio.open_connection(sock=raw, limit=1024)
            writers.append(writer)
            writer.write(request_bytes(model, ENDLESS_TOKENS))
            await reader.readexactly(100)
        await _until_quiet(gateway)
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def _until_quiet(gateway: psutil.Process) -> None:
    deadline = time.monotonic() + STALL_S
    while True:
        before = cpu_s(gateway)
        await asyncio.sleep(QUIET_S)
        if cpu_s(gateway) - before <= QUIET_CPU_S:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the gateway still works for streams that nobody has read for {STALL_S:g} s")


def table(alone: Sequence[Others], beside: Sequence[Others]) -> dict[str, Scalar]:
    """Medians of both, under their names."""
    found: dict[str, Scalar] = {}
    for name, measured in (("alone", alone), ("beside", beside)):
        for figure in asdict(measured[0]):
            found[f"{figure}_{name}"] = round(median(getattr(each, figure) for each in measured), 2)
    return found
