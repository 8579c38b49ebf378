"""LMCache's disk backend in an interpreter that has it; absent, and why, where none has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.store_harness.cases import Case

INSTALL = (
    "To have it: python -m venv DIR, name this environment's site-packages in a .pth file of it, then"
    " DIR/bin/pip install --no-deps lmcache cachetools numba llvmlite sortedcontainers msgspec pyzmq aiofile aiofiles"
    " caio blake3 nvtx py-cpuinfo aiohttp aiohappyeyeballs aiosignal frozenlist multidict yarl propcache attrs"
    " cryptography cffi pycparser; and --lmcache-python DIR/bin/python"
)
"""Without its dependencies on CUDA packages, beside the torch of this environment."""

_CHILD = Path(__file__).with_name("lmcache_child.py")


@dataclass(frozen=True)
class LMCacheFigures:
    """Bytes of payload a second, median of the rounds."""

    version: str
    read: float
    write: float
    """Its files synced by us afterwards, since it syncs nothing."""
    write_unsynced: float
    direct: bool
    """Whether it used O_DIRECT: not where the payload is no multiple of the file system's block."""


class LMCacheAbsent(Exception):
    """It cannot be measured here; the message says why."""


def measure(python: str, directory: Path, case: Case, rounds: int, threads: int) -> LMCacheFigures:
    """Raises LMCacheAbsent."""
    directory.mkdir()
    command = [python, "-P", str(_CHILD), str(directory), str(case.payload), str(case.count), str(rounds), str(threads)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["OMP_NUM_THREADS"] = "1"  # torch only fills and compares payloads there
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LMCacheAbsent(str(error)) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise LMCacheAbsent(lines[-1] if lines else f"exit status {done.returncode}")
    result = json.loads(done.stdout)
    if not result["right"]:
        raise LMCacheAbsent("it returned other bytes than were put")
    return LMCacheFigures(
        version=result["version"],
        read=median(result["read"]),
        write=median(result["write"]),
        write_unsynced=median(result["write_unsynced"]),
        direct=result["direct"],
    )


def default_python() -> str:
    """This interpreter."""
    return sys.executable
