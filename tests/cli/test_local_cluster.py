"""How a local cluster ends, with real processes; those that need no model are scripts or a lone router."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.cli.child import Child, ChildSpec
from headrace.cli.cluster_memory import WorkerMemory
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.exits import CliError
from headrace.cli.local_cluster import ChildFailed, LocalCluster

PATIENCE_S = 120.0
SECOND_SIGNAL = """
import signal, sys
got = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: got.append(1))
print("ready", flush=True)
while len(got) < 2:
    signal.sigtimedwait([], 0.05)
"""
DEAF = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
print("ready", flush=True)
signal.pause()
"""
LAUNCHER = """
import sys, time
from pathlib import Path
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
cluster = LocalCluster(ClusterSpec(Path(sys.argv[1]), {}), run_dir=Path(sys.argv[2]))
cluster.start()
print(cluster.children[0].pid, flush=True)
time.sleep(600)
"""


class Scripted(LocalCluster):
    """Children are scripts that say `ready` in their logs."""

    def __init__(self, spec: ClusterSpec, run_dir: Path, scripts: Mapping[str, str]) -> None:
        super().__init__(spec, run_dir=run_dir)
        for name, script in scripts.items():
            child = ChildSpec(name, name, (sys.executable, "-c", script), os.environ)
            self.children.append(Child(child, run_dir))
        while not all("ready" in child.tail() for child in self.children):
            assert not self.dead()

    def _spawn(self, name: str, wiring: tuple[str, ...], memory: Mapping[str, WorkerMemory]) -> None:
        raise AssertionError("everything runs already")


def ended(pid: int) -> bool:
    """Wait until a process that is no child of ours has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    events = poller.poll(PATIENCE_S * 1000)
    os.close(descriptor)
    return bool(events)


def test_hurry_sends_a_second_signal(tiny: Path, tmp_path: Path) -> None:
    """A drain that would last for ever ends when asked to."""
    spec = ClusterSpec(tiny, {}, sets=("stop.drain_seconds=3600",))
    cluster = Scripted(spec, tmp_path, {"router-0": SECOND_SIGNAL, "decode-0": SECOND_SIGNAL})
    cluster.hurry()
    assert cluster.stop() == []
    assert [child.status for child in cluster.children] == [0, 0]


def test_what_hangs_is_killed_and_named(tiny: Path, tmp_path: Path) -> None:
    """L6: the wait for a child has an end of its own."""
    spec = ClusterSpec(tiny, {}, sets=("stop.drain_seconds=0", "stop.close_seconds=0.05"))
    cluster = Scripted(spec, tmp_path, {"router-0": SECOND_SIGNAL, "decode-0": DEAF})
    assert cluster.stop() == ["decode-0"]
    assert cluster.child("decode-0").status == -signal.SIGKILL
    assert cluster.stop() == ["decode-0"]


def test_a_lone_router_comes_and_goes(tiny: Path) -> None:
    cluster = LocalCluster(ClusterSpec(tiny, {}))
    with cluster:
        assert cluster.client.status().ready
        assert cluster.status().replica.peer.replica_id == "router-0"
        run_dir, pid = cluster.run_dir, cluster.children[0].pid
        cluster.check()
    assert ended(pid)
    assert not run_dir.exists()
    assert cluster.stop() == []


def test_a_child_that_dies_at_the_start_shows_its_log(tiny: Path, tmp_path: Path) -> None:
    spec = ClusterSpec(tiny, {}, sets=("router.protocol=smoke",))
    with pytest.raises(ChildFailed, match=r"router-0 ended while .* \(exit status 2\)") as caught:
        LocalCluster(spec, run_dir=tmp_path).start()
    assert "router.protocol (--set router.protocol)" in str(caught.value)


def test_a_start_that_takes_too_long_ends(tiny: Path, tmp_path: Path) -> None:
    """L6."""
    cluster = LocalCluster(ClusterSpec(tiny, {}), run_dir=tmp_path, start_seconds=0)
    with pytest.raises(CliError, match="waited 0 s for the router to listen"):
        cluster.start()
    assert ended(cluster.children[0].pid)


def test_a_dead_child_is_noticed(tiny: Path, tmp_path: Path) -> None:
    with LocalCluster(ClusterSpec(tiny, {}), run_dir=tmp_path) as cluster:
        cluster.children[0].signal(signal.SIGKILL)
        assert cluster.children[0].wait(PATIENCE_S)
        with pytest.raises(ChildFailed, match="signal SIGKILL"):
            cluster.check()
        assert cluster.stop() == ["router-0"]


def test_children_die_with_a_launcher_that_is_killed(tiny: Path, tmp_path: Path) -> None:
    """`kill -9` of the launcher leaves no process."""
    command = [sys.executable, "-c", LAUNCHER, str(tiny), str(tmp_path)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    os.kill(pid, 0)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert ended(pid)
