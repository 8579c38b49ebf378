"""Builds and plays the double of libhf3fs_api_shared.so (double/). Fixtures are in conftest.py."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "double"
NAME = "libhf3fs_api_shared.so"


def build(folder: Path, *flags: str) -> Path:
    """Compile the double into `folder`; raises CalledProcessError with g++'s words when that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / NAME
    command = ["g++", "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-pthread", *flags]
    sources = [str(SOURCES / name) for name in ("api.cpp", "daemon.cpp")]
    subprocess.run([*command, "-shared", f"-Wl,-soname,{NAME}", "-o", str(target), *sources], check=True)
    return target


def make_mount(folder: Path) -> Path:
    """A directory that the double takes for a mounted 3FS."""
    (folder / "3fs-virt" / "iovs").mkdir(parents=True)
    return folder


class Double:
    """The knobs of a loaded double (double/daemon.h lists them)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        calls = ctypes.CDLL(str(path))
        self._set: Callable[[bytes, int], int] = calls.headrace_double_set
        self._get: Callable[[bytes], int] = calls.headrace_double_get
        calls.headrace_double_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        calls.headrace_double_get.argtypes = [ctypes.c_char_p]
        calls.headrace_double_get.restype = ctypes.c_int64

    def set(self, **settings: int) -> None:
        for key, value in settings.items():
            if self._set(key.encode(), value) != 0:
                raise KeyError(key)

    def get(self, key: str) -> int:
        return self._get(key.encode())

    def reset(self) -> None:
        """As if nothing had been set. What is held goes now."""
        self.set(mounted=1, hold=0, release=1 << 30, delay_us=0, jitter_us=0, fail_every=0, fail_errno=5)
        self.set(short_every=0, chunk_bytes=4 << 20, stray=0)


def fails(code: int) -> pytest.RaisesExc[OSError]:
    """The block raises an OSError of that errno."""
    return pytest.raises(OSError, match=rf"\[Errno {code}\]")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
