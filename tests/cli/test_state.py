"""How `generate` and `status` find a running cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import state, up
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.exits import CliError, Exit


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "runtime"
    monkeypatch.setenv("HEADRACE_RUNTIME", str(path))
    return path


def test_the_only_cluster_is_found(runtime: Path) -> None:
    mine = state.new_run_directory()
    state.publish(mine, mine, "127.0.0.1:1", "m", Path("/models/m"))
    assert state.find_router(None) == "127.0.0.1:1"
    assert state.find_router("h:9") == "h:9"
    assert runtime.stat().st_mode & 0o777 == 0o700


def test_none_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(CliError, match="headrace up") as caught:
        state.find_router(None)
    assert caught.value.code is Exit.UNREACHABLE


def write(runtime: Path, name: str, **fields: object) -> Path:
    folder = runtime / name
    folder.mkdir(parents=True)
    runtime.chmod(0o700)
    alive = {
        "pid": os.getpid(),
        "started": state.start_ticks(os.getpid()),
        "router": "r:1",
        "model": "m",
        "folder": "/m",
    }
    (folder / state.STATE_FILE).write_text(json.dumps({**alive, "run_dir": str(folder), **fields}))
    return folder


def test_several_have_to_be_told_apart(runtime: Path) -> None:
    write(runtime, "up-1", router="a:1")
    write(runtime, "up-2", router="b:1")
    with pytest.raises(CliError, match=r"a:1 \(m\).*b:1 \(m\)"):
        state.find_router(None)


def test_dead_launchers_do_not_count_and_their_files_go(runtime: Path) -> None:
    """A pid that belongs to another process now is recognised by its start."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = write(runtime, f"up-{gone.pid}", pid=gone.pid)
    write(runtime, "up-reused", started=1)
    write(runtime, "up-strange", surprise=1)
    assert state.running_clusters() == []
    state.new_run_directory()
    assert not left.exists()


def test_a_zombie_is_no_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert state.start_ticks(child.pid) is None
    child.wait()


def test_a_directory_that_others_can_write_is_refused(runtime: Path) -> None:
    runtime.mkdir()
    runtime.chmod(0o777)
    with pytest.raises(CliError, match="written by others"):
        state.runtime_directory()


class FakeCluster:
    """Ready at once, interrupted at once."""

    router = "127.0.0.1:7"
    children = ()

    def __init__(self, *_: object, **__: object) -> None:
        self.found: list[state.RunningCluster] = []
        self.up: Any = None

    def start(self) -> None:
        assert state.running_clusters() == []

    def dead(self) -> list[object]:
        self.found = state.running_clusters()
        self.up.on_signal(signal.SIGINT, None)
        return []

    def stop(self, *, drain: bool) -> list[str]:
        assert state.running_clusters() == [], "whoever comes now is not sent to a router that drains"
        return []


def test_a_cluster_whose_logs_go_elsewhere_is_found_as_well(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`headrace up --run-dir`: the directory stays with its logs, and what other commands look for goes."""
    monkeypatch.setattr(up, "LocalCluster", FakeCluster)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "router-0.log").touch()
    one = up._Up(ClusterSpec(tmp_path), up.UpOptions(logs, False, True, 1.0))
    cluster: Any = one.cluster
    cluster.up = one
    assert one.run() == 0
    assert [(found.router, found.run_dir) for found in cluster.found] == [("127.0.0.1:7", str(logs))]
    assert [path.name for path in logs.iterdir()] == ["router-0.log"]
    assert not list(runtime.iterdir())
