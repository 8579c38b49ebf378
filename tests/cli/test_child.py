"""One child: its cores, its log, its end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.child import Child, ChildSpec, address_file, describe_end
from headrace.cli.exits import CliError

PATIENCE_S = 60.0
_OPEN: list[Child] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().kill()


def start(run_dir: Path, script: str, *arguments: str, cores: frozenset[int] = frozenset()) -> Child:
    child = Child(ChildSpec("one-0", "one", (sys.executable, "-c", script, *arguments), os.environ, cores), run_dir)
    _OPEN.append(child)
    return child


def test_log_address_and_status(tmp_path: Path) -> None:
    address_file(tmp_path, "one-0").write_text("left by an earlier life\n")
    script = "import sys; print('\\n'.join(map(str, range(30)))); open(sys.argv[1], 'w').write('h:1\\n'); sys.exit(3)"
    child = start(tmp_path, script, str(address_file(tmp_path, "one-0")))
    assert child.wait(PATIENCE_S)
    assert child.status == 3
    assert child.address == "h:1"
    assert child.tail(2) == "28\n29"
    address_file(tmp_path, "one-0").unlink()
    child.log.unlink()
    assert child.address == "h:1"
    assert "was removed" in child.tail()


def test_an_old_address_is_forgotten_before_the_start(tmp_path: Path) -> None:
    address_file(tmp_path, "one-0").write_text("left by an earlier life\n")
    assert start(tmp_path, "").address is None


def test_it_runs_on_its_cores_and_the_parent_on_its_own(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    child = start(tmp_path, "import os; print(sorted(os.sched_getaffinity(0)))", cores=frozenset({core}))
    assert child.wait(PATIENCE_S)
    assert child.tail() == f"[{core}]"
    assert os.sched_getaffinity(0) == before


def test_cores_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot run on cores 4095"):
        start(tmp_path, "", cores=frozenset({4095}))


def test_a_terminals_interrupt_does_not_reach_it(tmp_path: Path) -> None:
    child = start(tmp_path, "import os; print(os.getpgrp() == os.getpid() == os.getsid(0))")
    assert child.wait(PATIENCE_S)
    assert child.tail() == "True"


def test_kill_takes_what_it_started_along(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "below = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1], 'w').write(str(below.pid) + '\\n')\n"
        "time.sleep(600)"
    )
    child = start(tmp_path, script, str(address_file(tmp_path, "one-0")))
    while not child.address:
        assert not child.wait(0.02), child.tail()
    below = os.pidfd_open(int(child.address))
    child.kill()
    assert child.status == -signal.SIGKILL
    # Readable when the process has ended, whoever reaps it.
    import select

    poller = select.poll()
    poller.register(below, select.POLLIN)
    assert poller.poll(PATIENCE_S * 1000)
    os.close(below)


def test_ends_in_words() -> None:
    assert describe_end(3) == "exit status 3"
    assert describe_end(-9) == "signal SIGKILL"
    assert describe_end(-99) == "signal 99"
