"""The ring's tests once more on a double built with the address and undefined-behaviour sanitisers, which also sees
what Python does with the memory that it shares with the double."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kvcache.store.threefs.conftest import DOUBLE_PATH, built


def runtime() -> str:
    """The sanitiser's library, which must be loaded before the interpreter's own allocations."""
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if not os.path.isabs(path):
        pytest.skip("g++ has no libasan.so beside it")
    return path


@pytest.mark.skipif(DOUBLE_PATH in os.environ, reason="this is the inner run")
def test_rings_on_a_sanitised_double() -> None:
    double = built("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
    environment = os.environ | {
        DOUBLE_PATH: str(double),
        "LD_PRELOAD": runtime(),
        # The interpreter keeps memory until its end by design; leaks are not what is looked for.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
    }
    tests = str(Path(__file__).with_name("test_ring.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", tests]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "passed" in result.stdout
    assert "runtime error" not in result.stderr
