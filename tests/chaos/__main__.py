"""`python -m tests.chaos`: kills, stops, spoilt wires, full disks and clock jumps in a load with known right answers.

Exits with 0 if every bar was met. Progress goes to stderr; with --json the last line of stdout is one object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.results import LONG_BARS, Bars, conclude
from tests.chaos.round import Found, Shape, play, seeds

LONG_S = 480.0
"""From here on a soak has to meet the numbers of a long one."""


def shapes(minutes: float, families: Sequence[str], clients: int) -> list[Shape]:
    """The rounds: DeepSeek-V4.1 with pictures for four tenths of the time, then DeepSeek-V3."""
    seconds = minutes * 60
    shares = {"v41": 0.4, "v3": 0.6} if len(families) > 1 else {families[0]: 1.0}
    found = []
    for family in families:
        replicas = {"router": 2, "prefill": 2, "decode": 3}
        if family == "v41":
            replicas = {"router": 2, "encoder": 2, "prefill": 2, "decode": 3}
        found.append(
            Shape(
                family,
                seconds * shares[family],
                replicas,
                clients=clients,
                templates=18 if family == "v41" else 30,
                tokens=12 if family == "v41" else 40,
            )
        )
    return found


async def soak(seed: int, rounds: Sequence[Shape], bars: Bars, scratch: Path) -> dict[str, Any]:
    """All rounds, one after another."""
    begun = time.monotonic()

    def told(text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - begun:5.0f}] {text}\n")
        sys.stderr.flush()

    found: list[Found] = []
    for index, (shape, own) in enumerate(zip(rounds, seeds(seed, len(rounds)), strict=True)):
        found.append(await play(own, shape, scratch / f"round-{index}-{shape.family}", told))
    return conclude(seed, found, bars)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of load and faults; starts come on top (10)")
    parser.add_argument("--seed", type=int, default=1, help="of all faults and requests (1)")
    parser.add_argument("--family", choices=("both", "v3", "v41"), default="both", help="which models serve (both)")
    parser.add_argument("--clients", type=int, default=12, help="that ask at once (12)")
    parser.add_argument("--folder", type=Path, help="a new folder for logs, which stay; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of stdout")
    options = parser.parse_args(arguments)
    families = ("v41", "v3") if options.family == "both" else (options.family,)
    rounds = shapes(options.minutes, families, options.clients)
    bars = LONG_BARS if options.minutes * 60 >= LONG_S else Bars()
    scratch = options.folder or Path(tempfile.mkdtemp(prefix="headrace-soak-"))
    sys.stderr.write(f"logs in {scratch}\n")
    result = asyncio.run(soak(options.seed, rounds, bars, scratch))
    if options.json:
        print(json.dumps(result))  # noqa: T201 - what is asked for
    else:
        for name, value in result.items():
            print(f"{name:34} {value}")  # noqa: T201
    for text in result["missed"]:
        sys.stderr.write(f"MISSED {text}\n")
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
