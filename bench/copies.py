"""Copies of entries between two processes' host memory: read by the reader or written by the lessor, GB/s and × memcpy.

    python -m bench.copies --json

What decides how a worker reads a peer's host tier: over TCP reading is slower than writing by a factor, so there the
lessor writes (kvcache/transfer/README.md). Entries are blocks of 114,048 B (V4.1), scattered on the lessor's side and
standing together on the reader's. Reads, writes and plain copies of the same bytes take turns, so that a busy machine
slows all; figures are of the best turn.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Callable, Sequence

import torch

from bench._other_side import other_side, stay
from bench._report import JsonValue, Report, Scalar, arguments, emit, positive
from headrace.kvcache.transfer.base import TransferEngine, TransferSettings
from headrace.kvcache.transfer.copies import Direction, Span
from headrace.kvcache.transfer.nixl import NixlTransferEngine
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole

BLOCK = 114_048
COUNTS = (1, 9, 37, 147)
WIRES = ("cma", "tcp")


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeat", type=positive, default=15, help="turns per case; the best is reported")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.serve is not None:
        stay(options.serve, make_served)
        return
    emit(measure(WIRES, COUNTS, options.repeat), as_json=options.json)


def measure(wires: Sequence[str], counts: Sequence[int], repeat: int) -> Report:
    """Every count of entries on every wire."""
    table = [row for wire in wires for row in measure_wire(wire, counts, repeat)]
    results: dict[str, JsonValue] = {}
    for wire in wires:
        rows = [row for row in table if row["wire"] == wire]
        for way in ("read", "write"):
            results[f"{wire}_{way}_ratio_to_memcpy"] = max(float(row[f"{way}_ratio"] or 0) for row in rows)
        results[f"{wire}_write_over_read"] = max(float(row["write_over_read"] or 0) for row in rows)
    return Report(
        name="copies",
        results=results,
        table=table,
        notes=("Digests are not part of it: the reader verifies every payload however it came.",),
    )


def measure_wire(wire: str, counts: Sequence[int], repeat: int) -> list[dict[str, Scalar]]:
    """Rows of the table for one wire."""
    most = max(counts)
    engine, ours = make_side(wire, most)
    plain = torch.zeros_like(ours)
    table: list[dict[str, Scalar]] = []
    with other_side("bench.copies", "--serve", wire, most) as description:
        found = engine.connect(description).result(60)
        for count in counts:
            spread, dense = [2 * index * BLOCK for index in range(count)], [index * BLOCK for index in range(count)]
            reads = [Span(local, remote, BLOCK) for local, remote in zip(dense, spread, strict=True)]
            writes = [Span(local, remote, BLOCK) for local, remote in zip(spread, dense, strict=True)]
            best = {"read": float("inf"), "write": float("inf"), "memcpy": float("inf")}
            for turn in range(repeat + 1):
                began = time.perf_counter()
                engine.copy(Direction.READ, description.incarnation, reads, region="fetched").wait()
                read = time.perf_counter()
                engine.copy(Direction.WRITE, description.incarnation, writes, region="host").wait()
                written = time.perf_counter()
                for row in range(count):
                    plain[row].copy_(ours[2 * row])
                copied = time.perf_counter()
                if turn:  # the first one connects
                    taken = {"read": read - began, "write": written - read, "memcpy": copied - written}
                    best = {name: min(seconds, taken[name]) for name, seconds in best.items()}
            gigabytes = count * BLOCK / 1e9
            table.append(
                {
                    "wire": found,
                    "entries": count,
                    **{name: round(gigabytes / seconds, 3) for name, seconds in best.items()},
                    "read_ratio": round(best["memcpy"] / best["read"], 3),
                    "write_ratio": round(best["memcpy"] / best["write"], 3),
                    "write_over_read": round(best["read"] / best["write"], 2),
                }
            )
    engine.close()
    return table


def make_served(wire: str, most: int) -> tuple[TransferEngine, Callable[[], None]]:
    """Of the child: its engine, and what closes it."""
    engine = make_side(wire, most)[0]
    return engine, engine.close


def make_side(wire: str, most: int) -> tuple[NixlTransferEngine, torch.Tensor]:
    """An engine with a host tier of twice `most` entries, its memory, and a buffer: the same in both processes."""
    engine = NixlTransferEngine(
        incarnation=uuid.uuid4().hex,
        layout_fingerprint=b"l" * 32,
        model_fingerprint=b"m" * 32,
        settings=TransferSettings(allowed_transports=frozenset({wire})),
    )
    host = torch.full((2 * most, BLOCK), 7, dtype=torch.uint8)
    engine.register(MemoryRegion("host", host, RegionRole.READABLE))
    engine.register(MemoryRegion("fetched", torch.zeros((most, BLOCK), dtype=torch.uint8), RegionRole.FETCHED))
    return engine, host


if __name__ == "__main__":
    main()
