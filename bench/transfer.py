"""Row pushes between two processes: GB/s by layout, number of rows and wire, and the ratio to memcpy in the same run.

    python -m bench.transfer --json

A receiver is started as a child; this process pushes rows of its pool into the child's landing rows through the
transfer engine, checksums and terminal notice included, as prefill does. Between the pushes of a case the same bytes
are copied inside this process (memcpy), so that a busy machine slows both sides of the ratio. Source rows are scattered
over the pool and landing rows stand together, as they do in service. Figures are of the best of several pushes, which
is what a machine shared with others can tell of bandwidth; the median stands beside them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench._other_side import other_side, stay
from bench._report import JsonValue, Report, Scalar, arguments, emit, positive
from bench._streams import RECEIVER, SENDER, StreamEnd, make_certificates
from headrace.kvcache.checksum import checksums
from headrace.kvcache.handle import ChecksumKind, Handle, LandingPart
from headrace.kvcache.transfer.base import PeerDescription, TransferEngine, TransferSettings
from headrace.kvcache.transfer.nixl import NixlTransferEngine
from headrace.kvcache.transfer.pushes import RowMove
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole

MODEL, LAYOUT = b"m" * 32, b"l" * 32


@dataclass(frozen=True)
class Case:
    """One layout's rows."""

    layout: str
    row_bytes: int
    counts: tuple[int, ...]


CASES = (
    Case("deepseek_v41", 114_048, (1, 8, 64, 512)),
    Case("smollm2_v3", 3_440_640, (1, 4, 16)),
)
WIRES = ("cma", "tcp", "stream")
"""`stream` is the fallback between hosts under mutual TLS: messages to the receiver's own port."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeat", type=positive, default=7, help="pushes per case; the median is reported")
    parser.add_argument("--wire", action="append", choices=WIRES, help="only these wires (default: all)")
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.receive is not None:
        stay(options.receive, make_receiver)
        return
    emit(measure(tuple(options.wire or WIRES), options.repeat), as_json=options.json)


@dataclass
class Timings:
    """Seconds of each repetition of one case."""

    push: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    checksum: list[float] = field(default_factory=list)


def measure(wires: Sequence[str], repeat: int) -> Report:
    """Every case on every wire."""
    table = [row for wire in wires for case in CASES for row in measure_case(case, wire, repeat)]

    def best(wire: str, column: str) -> float:
        return max(float(row[column] or 0) for row in table if row["wire"] == wire)

    results: dict[str, JsonValue] = {}
    for wire in wires:
        results[f"{wire}_gb_per_s"] = best(wire, "gb_per_s")
        results[f"{wire}_ratio_to_memcpy"] = best(wire, "ratio")
        results[f"{wire}_ratio_to_memcpy_without_checksum"] = best(wire, "ratio_wire")
    return Report(
        name="transfer",
        results=results,
        table=table,
        notes=(
            "gb_per_s counts the bytes of the rows once, from the call of push to its result, checksums included.",
            "ratio compares with copying the same bytes between two buffers of one process, in turn with the pushes;",
            "ratio_wire leaves out the time that the checksums of these rows take alone.",
            "The first push of a case is not counted: connecting takes some 20 ms.",
        ),
    )


def measure_case(case: Case, wire: str, repeat: int) -> list[dict[str, Scalar]]:
    """Rows of the table for one layout on one wire."""
    with tempfile.TemporaryDirectory() as folder:
        if wire == "stream":
            make_certificates(Path(folder))
        return _measure(case, wire, repeat, folder)


def _measure(case: Case, wire: str, repeat: int, folder: str) -> list[dict[str, Scalar]]:
    most = max(case.counts)
    engine, close = make_engine(wire, folder, SENDER)
    pool = torch.full((2 * most, case.row_bytes), 7, dtype=torch.uint8)
    copy = torch.zeros_like(pool)
    engine.register(MemoryRegion("pool", pool))
    table: list[dict[str, Scalar]] = []
    with other_side("bench.transfer", "--receive", case, wire, folder) as description:
        found = engine.connect(description).result(60)
        for count in case.counts:
            sources = tuple(range(0, 2 * count, 2))
            targets = tuple(range(count))
            seconds = Timings()
            for turn in range(repeat + 1):
                grant = make_handle(description, case, f"{count}.{turn}", targets)
                start = time.perf_counter()
                result = engine.push(grant, [RowMove("pool", sources, targets)], last=True).wait()
                pushed = time.perf_counter()
                for row in sources:
                    copy[row].copy_(pool[row])
                copied = time.perf_counter()
                checksums(pool, sources, ChecksumKind.XXH3_64)
                seconds.push.append(pushed - start)
                seconds.memcpy.append(copied - pushed)
                seconds.checksum.append(time.perf_counter() - copied)
            push, memcpy, summing = (min(times[1:]) for times in (seconds.push, seconds.memcpy, seconds.checksum))
            gigabytes = count * case.row_bytes / 1e9
            table.append(
                {
                    "layout": case.layout,
                    "wire": found,
                    "rows": count,
                    "row_bytes": case.row_bytes,
                    "pieces": result.descriptors,
                    "gb_per_s": round(gigabytes / push, 3),
                    "gb_per_s_median": round(gigabytes / statistics.median(seconds.push[1:]), 3),
                    "memcpy": round(gigabytes / memcpy, 3),
                    "checksum": round(gigabytes / summing, 3),
                    "ratio": round(memcpy / push, 3),
                    "ratio_wire": round(memcpy / max(push - summing, 1e-9), 3),
                }
            )
    close()
    return table


def make_engine(wire: str, folder: str, name: str) -> tuple[TransferEngine, Callable[[], None]]:
    """The engine of one end, and what closes it. `folder`: of certificates; `name`: which of them."""
    if wire == "stream":
        end = StreamEnd(Path(folder), name, LAYOUT, MODEL)
        return end.engine, end.close
    engine = NixlTransferEngine(
        incarnation=uuid.uuid4().hex,
        layout_fingerprint=LAYOUT,
        model_fingerprint=MODEL,
        settings=TransferSettings(allowed_transports=frozenset({wire})),
    )
    return engine, engine.close


def make_handle(peer: PeerDescription, case: Case, transfer_id: str, rows: tuple[int, ...]) -> Handle:
    return Handle(
        transfer_id=transfer_id,
        incarnation=peer.incarnation,
        request_id=transfer_id,
        attempt=1,
        generation=1,
        layout_fingerprint=LAYOUT,
        model_fingerprint=MODEL,
        parts=(LandingPart(None, tuple(range(len(rows))), rows, None),),
        row_bytes=case.row_bytes,
        slot_bytes=0,
        checksum_kind=ChecksumKind.XXH3_64,
    )


def make_receiver(case: Case, wire: str, folder: str) -> tuple[TransferEngine, Callable[[], None]]:
    """Of the child: an engine with landing rows for the case, and what closes it."""
    engine, close = make_engine(wire, folder, RECEIVER)
    landing = torch.zeros((max(case.counts), case.row_bytes), dtype=torch.uint8)
    engine.register(MemoryRegion("landing", landing, RegionRole.LANDING_ROWS))
    return engine, close


if __name__ == "__main__":
    main()
