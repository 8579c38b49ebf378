"""The wall clock of the cluster's processes, which the harness moves: a preloaded library adds what a file says."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class WallClock:
    """Of all processes that are started with `environ`. Without a C compiler it cannot be moved; `reason` says so."""

    def __init__(self, folder: Path) -> None:
        self.reason = ""
        self.offset_s = 0.0
        self._environ: dict[str, str] = {}
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            self.reason = "no C compiler (gcc)"
            return
        library, shared = folder / "clock.so", folder / "clock.offset"
        shared.write_bytes(bytes(8))
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            self.reason = f"clock.c does not compile: {built.stderr[-500:]}"
            return
        with shared.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 8)
        self._environ = {"LD_PRELOAD": str(library), "CHAOS_CLOCK_FILE": str(shared)}

    @property
    def environ(self) -> Mapping[str, str]:
        return self._environ

    def move(self, seconds: float) -> None:
        """Let it jump, ahead or back; seconds are added to what it is ahead by already."""
        self.offset_s += seconds
        self._shared[:] = struct.pack("q", round(self.offset_s * 1e9))
