"""Compile the C++ sources once per machine and load them: no build step at install, no Python headers, no torch.

The library is kept in the user's cache under a name that covers sources, flags and compiler. It is built for the
processor's family and not for its model, so that the name needs no more.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from headrace.router.native import structs

_SOURCES: Final = Path(__file__).parent
_UNIT: Final = "router.cpp"
_FLAGS: Final = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off")
"""Without contraction every sum is rounded as numpy rounds it, and equal costs stay equal."""


class NativeUnavailable(RuntimeError):
    """The library cannot be used here; the message says why. The Python code decides the same, slower."""


class NativeRouter:
    """The loaded library's functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.match_blocks = library.headrace_match_blocks
        self.match_snapshots = library.headrace_match_snapshots
        self.choose_pair = library.headrace_choose_pair
        for function, arguments in ((self.match_blocks, 2), (self.match_snapshots, 2), (self.choose_pair, 6)):
            function.argtypes = [ctypes.c_void_p] * arguments
            function.restype = None
        sizes = library.headrace_router_sizes
        sizes.argtypes, sizes.restype = [ctypes.c_int64], ctypes.c_int64
        for which, structure in enumerate(structs.ALL):
            if sizes(which) != ctypes.sizeof(structure):
                raise NativeUnavailable(f"{structure.__name__} has {sizes(which)} bytes in C++, others here")


@cache
def load_native() -> NativeRouter:
    """Build if needed and load. Takes a second or two the first time, milliseconds later.

    Raises:
        NativeUnavailable: no compiler (g++ or $CXX), it failed, or what it made does not load.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise NativeUnavailable("no C++ compiler: install g++")
    path = _directory() / f"router-{_digest(compiler)}.so"
    if not path.is_file():
        _compile(compiler, path)
    try:
        return NativeRouter(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path} does not load: {error}") from error


def _directory() -> Path:
    """In $HEADRACE_CACHE, else $XDG_CACHE_HOME/headrace, else ~/.cache/headrace."""
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own) / "native"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "native"


def _digest(compiler: str) -> str:
    digest = hashlib.sha256()
    for source in sorted((*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise NativeUnavailable(f"the C++ compiler {compiler} does not run: {error}") from error
    digest.update("\0".join((*_FLAGS, version, platform.machine())).encode())
    return digest.hexdigest()[:24]


def _compile(compiler: str, path: Path) -> None:
    """One process compiles, others wait; the file appears whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = (path.parent / ".router-lock").open("w")
    except OSError as error:
        raise NativeUnavailable(f"cannot write to {path.parent}: {error}; set HEADRACE_CACHE") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh = Path(folder) / path.name
            command = [compiler, *_FLAGS, str(_SOURCES / _UNIT), "-o", str(fresh)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise NativeUnavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()[-2000:]}")
            os.replace(fresh, path)


def main() -> None:
    """Compile ahead of time; exit status 1 and the reason where that is impossible."""
    try:
        load_native()
    except NativeUnavailable as reason:
        sys.exit(str(reason))


if __name__ == "__main__":
    main()
