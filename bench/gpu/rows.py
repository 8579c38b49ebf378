"""Rows pushed between two GPUs, each owned by a process of its own, through the transfer engine.

    python3 -m bench.gpu.rows            # GPU 0 → GPU 1, or GPU 0 → GPU 0 where there is one

Rows scattered over the sender's pool go to landing rows on the receiver, gathered into staging memory and row by row;
the receiver copies them into its own pool and checks every byte. Beside them, in the same run, a plain copy between the
two devices. ``measure`` is what the GPU script calls.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe

import torch

from headrace.kernels.reference.rows import copy_rows
from headrace.kvcache.checksum import checksums
from headrace.kvcache.handle import ChecksumKind, Handle, LandingPart
from headrace.kvcache.transfer.base import PeerDescription, TransferSettings
from headrace.kvcache.transfer.nixl import NixlTransferEngine
from headrace.kvcache.transfer.pushes import RowMove
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole

MODEL, LAYOUT = b"m" * 32, b"l" * 32
SEED = 5


@dataclass(frozen=True)
class RowPush:
    """One way of sending one number of rows."""

    row_bytes: int
    rows: int
    way: str
    """``gathered`` or ``row by row``."""
    wire: str
    """As UCX tells: ``cuda_ipc`` over NVLink or PCIe."""
    pieces: int
    gb_per_s: float
    """From the call of push to its result: gather kernel, checksum kernel and wire. Median."""
    peer_copy_gb_per_s: float
    """tensor.copy_ of as many bytes between the two devices."""
    equal: bool
    """Every row arrived byte for byte, copied from landing rows into pool rows."""


def measure(
    source: int,
    target: int,
    *,
    row_bytes: int = 114_048,
    counts: Sequence[int] = (8, 64, 512, 2048),
    repeat: int = 7,
) -> list[RowPush]:
    """Push rows from GPU ``source`` (this process) to GPU ``target`` (a child). The indices may be equal.

    Raises:
        RuntimeError: no such GPU, or the child does not answer. TransferError: what the engine says.
    """
    if max(source, target) >= torch.cuda.device_count():
        raise RuntimeError(f"GPUs {source} and {target} wanted, {torch.cuda.device_count()} are here")
    results: list[RowPush] = []
    most = max(counts)
    pool = pattern(2 * most, row_bytes, source)
    with receiver(target, most, row_bytes) as (description, child):
        for gather in (True, False):
            engine = make_engine(TransferSettings(gather=gather))
            engine.register(MemoryRegion("pool", pool))
            engine.connect(description).result(60)
            for count in counts:
                results.append(_one(engine, description, child, pool, (source, target), count, gather, repeat))
            engine.close()
    return results


def _one(
    engine: NixlTransferEngine,
    description: PeerDescription,
    child: Connection,
    pool: torch.Tensor,
    devices: tuple[int, int],
    count: int,
    gather: bool,
    repeat: int,
) -> RowPush:
    row_bytes = pool.shape[1]
    sources, targets = tuple(range(0, 2 * count, 2)), tuple(range(count))
    seconds: list[float] = []
    for turn in range(repeat + 1):
        grant = make_handle(description, f"{gather}.{count}.{turn}", targets, row_bytes)
        torch.cuda.synchronize(devices[0])
        start = time.perf_counter()
        result = engine.push(grant, [RowMove("pool", sources, targets)], last=True).wait()
        seconds.append(time.perf_counter() - start)
    child.send((targets, sources, result.checksums[0]))
    if not child.poll(120):
        raise RuntimeError("the receiving process does not answer; see its output above")
    gigabytes = count * row_bytes / 1e9
    return RowPush(
        row_bytes=row_bytes,
        rows=count,
        way="gathered" if gather else "row by row",
        wire=result.transport,
        pieces=result.descriptors,
        gb_per_s=round(gigabytes / statistics.median(seconds[1:]), 2),
        peer_copy_gb_per_s=round(gigabytes / _peer_copy(devices, count * row_bytes, repeat), 2),
        equal=bool(child.recv()),
    )


def _peer_copy(devices: tuple[int, int], nbytes: int, repeat: int) -> float:
    """Median seconds of a plain copy of as many bytes from one device to the other."""
    here = torch.ones(nbytes, dtype=torch.uint8, device=f"cuda:{devices[0]}")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{devices[1]}")
    seconds: list[float] = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize(devices[0])
        start = time.perf_counter()
        there.copy_(here)
        torch.cuda.synchronize(devices[0])
        torch.cuda.synchronize(devices[1])
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def pattern(rows: int, row_bytes: int, device: int) -> torch.Tensor:
    """The sender's pool; the receiver computes it again to compare."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=generator).to(f"cuda:{device}")


def make_engine(settings: TransferSettings) -> NixlTransferEngine:
    return NixlTransferEngine(
        incarnation=uuid.uuid4().hex, layout_fingerprint=LAYOUT, model_fingerprint=MODEL, settings=settings
    )


def make_handle(peer: PeerDescription, transfer_id: str, rows: tuple[int, ...], row_bytes: int) -> Handle:
    return Handle(
        transfer_id=transfer_id,
        incarnation=peer.incarnation,
        request_id=transfer_id,
        attempt=1,
        generation=1,
        layout_fingerprint=LAYOUT,
        model_fingerprint=MODEL,
        parts=(LandingPart(None, tuple(range(len(rows))), rows, None),),
        row_bytes=row_bytes,
        slot_bytes=0,
        checksum_kind=ChecksumKind.LANES_64,
    )


@contextmanager
def receiver(device: int, rows: int, row_bytes: int) -> Iterator[tuple[PeerDescription, Connection]]:
    """A child process with landing rows on a device."""
    ours, theirs = Pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu.rows", "--receive", str(theirs.fileno())], pass_fds=(theirs.fileno(),)
    )
    theirs.close()
    try:
        ours.send((device, rows, row_bytes))
        if not ours.poll(180):
            raise RuntimeError("the receiving process does not answer; see its output above")
        yield ours.recv(), ours
    finally:
        ours.close()
        child.wait(60)


def receive(parent: Connection) -> None:
    """The child: landing rows, and the check of what landed, until the parent hangs up."""
    device, rows, row_bytes = parent.recv()
    engine = make_engine(TransferSettings())
    landing = torch.zeros((rows, row_bytes), dtype=torch.uint8, device=f"cuda:{device}")
    pool = torch.zeros((2 * rows, row_bytes), dtype=torch.uint8, device=f"cuda:{device}")
    expected = pattern(2 * rows, row_bytes, device)
    engine.register(MemoryRegion("landing", landing, RegionRole.LANDING_ROWS))
    parent.send(engine.describe())
    while True:
        try:
            landed, wanted, sums = parent.recv()
        except EOFError:
            engine.close()
            return
        here, there = (torch.tensor(items, device=landing.device) for items in (landed, wanted))
        pool.zero_()
        copy_rows(landing, here, pool, there)
        same = torch.equal(pool[there], expected[there])
        parent.send(same and checksums(pool, wanted, ChecksumKind.LANES_64) == tuple(sums))
        landing.zero_()
        torch.cuda.synchronize(device)


def main(argv: Sequence[str]) -> None:
    if argv[:1] == ["--receive"]:
        receive(Connection(int(argv[1])))
        return
    results = measure(0, 1 if torch.cuda.device_count() > 1 else 0)
    print(json.dumps([asdict(result) for result in results]))


if __name__ == "__main__":
    main(sys.argv[1:])
