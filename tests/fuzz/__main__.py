"""`python -m tests.fuzz --messages 20000 --handles 2000 --seed 1 --json`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from tests.fuzz.run import Size, fuzz
from tests.fuzz.world import running


def main() -> int:
    """Exit status 0: nothing was violated."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description="Fuzz every port of a local cluster.")
    parser.add_argument("--messages", type=int, default=20_000, help="mutated messages")
    parser.add_argument("--handles", type=int, default=2_000, help="forged, replayed, stale and crossed handles")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the whole report in one line, last")
    parser.add_argument("--only", default="", help="methods whose Service/Method holds this text")
    parser.add_argument("--keep", type=Path, help="folder for logs and the report; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-fuzz-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with running(folder) as cluster:
            size = Size(options.messages, options.handles, options.seed, options.only)
            report = asyncio.run(fuzz(cluster, size, say=lambda text: _tell(sys.stderr, text)))
        (folder / "report.json").write_text(json.dumps(report, indent=1))
    brief = {key: value for key, value in report.items() if key != "methods"}
    _tell(sys.stdout, json.dumps(report) if options.json else json.dumps(brief, indent=1))
    return 0 if report["ok"] else 1


def _tell(where: TextIO, text: str) -> None:
    where.write(f"{text}\n")
    where.flush()


if __name__ == "__main__":
    raise SystemExit(main())
