"""The store beside the disk itself: cold reads and durable writes as shares of plain preadv / pwritev.

    python -m bench.store --json

For payloads of 114,048 B (records of 118,784 B), 1 MiB and 4 MiB: raw calls with O_DIRECT at the same places, in the
same sizes, from 1, 4 and 8 threads; and the segment engine with as many. Both sides count whole records. Raw and engine
take turns in five rounds; a round's ratio is of each side's best number of threads, and the median round is judged.
Raw reads use the very files that the engine wrote; raw writes go into a preallocated file and are synced as often as
the engine syncs, every 64 MiB. Beside them one file per block, LMCache's local disk backend if an interpreter has it
(--lmcache-python), SeaweedFS with two copies on this machine, and the index. Exit status 1 if a ratio is below its
limit: read 0.90, verified read 0.85, durable write 0.85 (payloads of 114,048 B are judged, the other sizes told).
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench._progress import Advance, Phases
from bench._report import JsonValue, Report, Scalar, arguments, emit, positive
from bench.store_harness import files, lmcache, raw
from bench.store_harness.cases import MIB, Case, cases, entries, payload_pattern
from bench.store_harness.engine import Engine
from bench.store_harness.lookups import measure_index
from bench.store_harness.peers import lmcache_rows, row, weed_rows
from headrace.kvcache.store.segments.settings import SegmentSettings

PAYLOADS = (114_048, MIB, 4 * MIB)
THREADS = (1, 4, 8)
FILES_SHARE = 8
"""They are so much slower to write that a part of them tells enough."""
PEERS = ("lmcache", "seaweedfs")
LIMITS = {"read_ratio": 0.90, "verified_read_ratio": 0.85, "write_ratio": 0.85}


@dataclass
class Timings:
    """Seconds of every round, by what was done and the number of threads."""

    case: Case
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def add(self, what: str, threads: int, seconds: float) -> None:
        self.seconds.setdefault((what, threads), []).append(seconds)

    def best(self, what: str) -> tuple[float, int]:
        """Bytes a second with the best number of threads, and that number."""
        return max(
            (self.case.total / statistics.median(seconds), threads)
            for (name, threads), seconds in self.seconds.items()
            if name == what
        )

    def ratios(self, what: str, of: str) -> list[float]:
        """Speed of `what` as a share of that of `of`, round by round, each side with its best number of threads."""
        rounds = len(next(iter(self.seconds.values())))
        return [self._fastest(of, turn) / self._fastest(what, turn) for turn in range(rounds)]

    def _fastest(self, what: str, turn: int) -> float:
        return min(seconds[turn] for (name, _), seconds in self.seconds.items() if name == what)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="a directory on the disk to measure")
    parser.add_argument("--mib", type=positive, default=512, help="MiB of records per case and round")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--threads", type=positive, nargs="+", default=THREADS)
    parser.add_argument("--payloads", type=positive, nargs="+", default=PAYLOADS, help="bytes; the first one is judged")
    parser.add_argument("--index-rows", type=positive, default=100_000)
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS, help="what else is measured")
    parser.add_argument("--lmcache-python", default=lmcache.default_python(), help="an interpreter that has lmcache")
    options = parser.parse_args(argv)

    directory = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=options.dir))
    rows: list[dict[str, Scalar]] = []
    beside: list[tuple[list[dict[str, Scalar]], str]] = []
    results: dict[str, JsonValue] = {}
    try:
        with Phases() as phases:
            for case in cases(options.mib * MIB, tuple(options.payloads)):
                label = f"records of {case.record:,} B"
                with phases.phase(label, options.rounds * len(options.threads)) as advance:
                    timings = measure_case(directory, case, options.rounds, tuple(options.threads), advance)
                rows += table(timings)
                results |= judged(timings, "" if case.payload == options.payloads[0] else f"_{case.payload}")
                if "lmcache" in options.peers:
                    with phases.phase(f"{label}: LMCache"):
                        beside.append(lmcache_rows(directory, case.payload, options.lmcache_python))
            if "seaweedfs" in options.peers:
                with phases.phase("SeaweedFS"):
                    beside.append(weed_rows(directory, options.payloads[0]))
            with phases.phase("index"):
                index = measure_index(directory, options.index_rows)
    finally:
        shutil.rmtree(directory)
    results |= {
        "load_average": round(os.getloadavg()[0], 1),
        "lookups_per_s": round(index.lookups_per_s),
        "lookups_per_s_without_dict": round(index.cold_lookups_per_s),
        "index_puts_per_s": round(index.puts_per_s),
        "index_bytes_per_block": round(index.bytes_per_block, 1),
        "limits": dict(LIMITS),
    }
    missed = below(results)
    results["passed"] = not missed
    notes = ["MB/s count whole records, except LMCache's, which count its payload.", *(why for _, why in beside if why)]
    rows += [each for found, _ in beside for each in found]
    emit(Report("store", results, rows, notes), as_json=options.json)
    if missed:
        sys.exit(f"below the limit: {', '.join(missed)}")


def below(results: Mapping[str, JsonValue]) -> list[str]:
    """The judged ratios that miss their limits."""
    return [
        f"{name} {value} < {limit}"
        for name, limit in LIMITS.items()
        if not isinstance(value := results[name], float) or value < limit
    ]


def measure_case(directory: Path, case: Case, rounds: int, threads: tuple[int, ...], advance: Advance) -> Timings:
    """All rounds; whoever comes first in one round comes last in the next."""
    timings = Timings(case)
    payload = payload_pattern(case.payload)
    stored = directory / "stored"
    kept = entries(case, payload)
    engine = Engine(stored, 4)
    engine.write(case, kept)
    rows_ = engine.rows(kept)
    places = sorted((stored / each.group, each.place) for each in rows_)
    read_runs = raw.runs_of(places, case.record, engine.settings.read_bytes)
    engine.close()
    for turn in range(rounds):
        for count in threads:
            reader = Engine(stored, count)
            writer = Engine(directory / "written", count)
            # What a process touches for the first time is no part of a steady state.
            reader.read_verified(case, kept)
            writer.write(case, entries(case, payload))
            steps: list[tuple[str, Callable[[], float]]] = [
                ("raw read", partial(raw.read, read_runs, case.record, count)),
                ("read", partial(reader.read_unverified, case, rows_)),
                ("verified read", partial(reader.read_verified, case, kept)),
                ("raw write", partial(write_raw, directory, case, count, writer.settings)),
                ("write", partial(writer.write, case, entries(case, payload))),
            ]
            for what, step in steps if turn % 2 == 0 else reversed(steps):
                os.sync()  # nobody pays for what the step before has left to be written
                timings.add(what, count, step())
            reader.close()
            writer.close()
            shutil.rmtree(directory / "written")
            measure_files(directory / "files", case, count, timings)
            advance()
    shutil.rmtree(stored)
    return timings


def write_raw(directory: Path, case: Case, threads: int, settings: SegmentSettings) -> float:
    file = directory / "raw"
    raw.preallocate(file, case.total)
    places = [(file, number * case.record) for number in range(case.count)]
    try:
        runs = raw.runs_of(places, case.record, settings.write_bytes)
        return raw.write(runs, case.record, threads, settings.sync_bytes)
    finally:
        file.unlink()


def measure_files(directory: Path, case: Case, threads: int, timings: Timings) -> None:
    """A part of the blocks in files of their own is written, read and unlinked; seconds are told as of all of them."""
    count = max(1, case.count // FILES_SHARE)
    paths = files.names(directory, count)
    scale = case.count / count
    timings.add("file per block, write", threads, scale * files.write(paths, case.record, threads))
    timings.add("file per block, read", threads, scale * files.read(paths, case.record, threads))
    timings.add("file per block, unlink", threads, scale * files.free(paths))
    shutil.rmtree(directory)


def judged(timings: Timings, suffix: str) -> dict[str, JsonValue]:
    """The ratios of one case under the names that the issue gives them."""
    out: dict[str, JsonValue] = {}
    for name, what, of in (
        ("read_ratio", "read", "raw read"),
        ("verified_read_ratio", "verified read", "raw read"),
        ("write_ratio", "write", "raw write"),
        ("file_per_block_read_ratio", "file per block, read", "raw read"),
        ("file_per_block_write_ratio", "file per block, write", "raw write"),
    ):
        ratios = timings.ratios(what, of)
        out[name + suffix] = round(statistics.median(ratios), 3)
        out[name + suffix + "_rounds"] = [round(each, 3) for each in ratios]
    return out


def table(timings: Timings) -> list[dict[str, Scalar]]:
    whats = dict.fromkeys(name for name, _ in timings.seconds)
    return [row(timings.case, what, *timings.best(what)) for what in whats]


if __name__ == "__main__":
    main()
