"""The double is compiled once for all xdist workers and kept by the hash of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.kvcache.store.threefs.layer import ThreeFsLayer
from headrace.kvcache.store.threefs.settings import ThreeFsSettings
from tests.kvcache.store.threefs import usrbio_double
from tests.kvcache.store.threefs.usrbio_double import Double

DOUBLE_PATH = "HEADRACE_TEST_USRBIO_DOUBLE"
"""Environment: use this build of the double (test_sanitised.py)."""


def built(*flags: str) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed, and the double of libhf3fs_api_shared.so is written in C++")
    text = "".join(sorted(path.read_text() for path in usrbio_double.SOURCES.iterdir()))
    digest = hashlib.sha256((text + repr(flags)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"headrace-usrbio-double-{digest}"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        target = folder / usrbio_double.NAME
        if not target.exists():
            usrbio_double.build(folder / "new", *flags).rename(target)
    return target


@pytest.fixture(scope="session")
def double_path() -> Path:
    given = os.environ.get(DOUBLE_PATH)
    return Path(given) if given else built()


@pytest.fixture
def double(double_path: Path) -> Iterator[Double]:
    """The double, quiet; at the end it must have been used as the published header allows."""
    double = Double(double_path)
    double.reset()
    before = double.get("violations")
    yield double
    double.reset()
    assert double.get("violations") == before, "two threads prepared or waited on one ring"


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    return usrbio_double.make_mount(tmp_path / "mount")


def settings_of(double: Double, **changes: object) -> ThreeFsSettings:
    values: dict[str, object] = {
        "library": str(double.path),
        "read_bytes": 1 << 20,
        "write_bytes": 1 << 20,
        "slot_bytes": 1 << 16,
        "io_timeout_s": 5.0,
    }
    return ThreeFsSettings(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def layer(double: Double, mount: Path) -> Iterator[ThreeFsLayer]:
    root = mount / "store"
    root.mkdir()
    layer = ThreeFsLayer(str(root), settings_of(double))
    yield layer
    layer.close()
