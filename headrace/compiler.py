"""Compile C++ once per machine, at first use: no build step at install, no Python headers, no torch.

A library is kept in the user's cache under a name that covers sources, flags, compiler and processor, so that a home
directory shared by unlike machines is safe.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.user_cache import cache_directory


class NativeUnavailable(RuntimeError):
    """C++ cannot be used here; the message says why. Each library has a twin without it that does the same, slower."""


def compiled(unit: Path, compile_flags: Sequence[str], link_flags: Sequence[str] = (), *, without: str) -> Path:
    """The shared library of the file `unit` and the headers beside it, built if it is not in the cache.

    `without`: how to run without a compiler, for the message.

    Raises:
        NativeUnavailable: no compiler (g++ or $CXX), it does not run or failed, or the cache cannot be written.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise NativeUnavailable(f"no C++ compiler: install g++, or {without}")
    name = f"{unit.stem}-{source_digest(unit.parent, compiler, (*compile_flags, *link_flags))}.so"
    path = cache_directory() / "native" / name
    if not path.is_file():
        _compile(compiler, unit, compile_flags, link_flags, path)
    return path


def source_digest(folder: Path, compiler: str, flags: Sequence[str]) -> str:
    """24 hex digits of everything that decides what comes out. Raises NativeUnavailable: the compiler does not run."""
    digest = hashlib.sha256()
    for source in sorted((*folder.glob("*.h"), *folder.glob("*.cpp"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise NativeUnavailable(f"the C++ compiler {compiler} does not run: {error}") from error
    digest.update("\0".join((*flags, version, platform.machine(), _processor())).encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What -march=native looks at: model and feature flags of the first processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in text.split("\n\n")[0].splitlines() if line.startswith(wanted))


def _compile(compiler: str, unit: Path, compile_flags: Sequence[str], link_flags: Sequence[str], path: Path) -> None:
    """One process compiles, others wait; the file appears whole. Linked apart, so that a library may leave what its
    flags ask for (-fopenmp) to the process that loads it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = (path.parent / ".lock").open("w")
    except OSError as error:
        raise NativeUnavailable(f"cannot write to {path.parent}: {error}; set HEADRACE_CACHE") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh = Path(folder) / path.name
            objects = Path(folder) / "unit.o"
            for command in (
                [compiler, *compile_flags, "-c", str(unit), "-o", str(objects)],
                [compiler, "-shared", str(objects), *link_flags, "-o", str(fresh)],
            ):
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    raise NativeUnavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()[-2000:]}")
            os.replace(fresh, path)
