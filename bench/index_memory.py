"""What the router's prefix index costs: resident bytes for a block and each holder, and microseconds of a core.

    python -m bench.index_memory --blocks 1000000 --json

Memory is the growth of a fresh process's resident set while so many blocks are stored, first by one holder and then by
further ones; the limits are the issue's: 64 bytes for a block with its first holder, 8 for each further one. Times are
of this process's core (not of the clock on the wall), and no limit. Exit status 1 if a limit of memory is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from bench._progress import Phases
from bench._report import Report, Scalar, arguments, emit, positive
from bench.index_harness.memory import IndexMemory, measure
from bench.index_harness.speed import CASES, IndexSpeed, measure_speed

FIRST_BYTES = 64.0
FURTHER_BYTES = 8.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--blocks", type=positive, default=1_000_000)
    parser.add_argument(
        "--holders", type=positive, nargs="*", default=[1, 2, 4, 7], help="further holders, a run for each"
    )
    options = parser.parse_args(argv)
    with Phases() as phases:
        memories: list[IndexMemory] = []
        for holders in options.holders:
            with phases.phase(f"memory, {holders} further holders"):
                memories.append(measure(options.blocks, holders))
        with phases.phase("speed"):
            speed = measure_speed(max(65_536, min(options.blocks, 200_000)))
    report = as_report(memories, speed)
    emit(report, as_json=options.json)
    if not report.results["passed"]:
        sys.exit(1)


def as_report(memories: Sequence[IndexMemory], speed: IndexSpeed) -> Report:
    """Rows per number of further holders."""
    rows: list[dict[str, Scalar]] = [asdict(memory) for memory in memories]
    passed = all(
        memory.first_holder_bytes <= FIRST_BYTES and memory.further_holder_bytes <= FURTHER_BYTES for memory in memories
    )
    return Report(
        name="index_memory",
        results={
            "passed": passed,
            "limits": {"first_holder_bytes": FIRST_BYTES, "further_holder_bytes": FURTHER_BYTES},
            "core_us": {name: getattr(speed, name) for name in CASES},
        },
        table=rows,
        notes=["Bytes are growth of the resident set of a fresh process; times are microseconds of a core, medians."],
    )


if __name__ == "__main__":
    main()
