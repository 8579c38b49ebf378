"""One budget for all workers of a host: real processes, real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.kvcache.host.budget import BudgetError, HostBudget
from headrace.kvcache.process import ProcessIdentity

CLAIM = """
import sys
from pathlib import Path
from headrace.kvcache.host.budget import HostBudget
directory, incarnation, wanted, limit = sys.argv[1:]
sys.stdin.readline()
print(HostBudget(Path(directory), lambda: int(limit)).claim(incarnation, int(wanted)), flush=True)
sys.stdin.read()
"""
"""Waits for a line, claims, prints what it got, holds it until its input ends."""


class Worker:
    def __init__(self, directory: Path, incarnation: str, wanted: int, limit: int) -> None:
        arguments = [sys.executable, "-c", CLAIM, str(directory), incarnation, str(wanted), str(limit)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def given(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def make(incarnation: str, wanted: int, limit: int = 1000) -> Worker:
        workers.append(Worker(tmp_path, incarnation, wanted, limit))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def held(directory: Path) -> dict[str, int]:
    budget = HostBudget(directory, lambda: 1000)
    return {share.incarnation: share.nbytes for share in budget.shares()}


def test_workers_that_start_at_once_never_get_more_than_there_is(tmp_path: Path, start: Callable[..., Worker]) -> None:
    """L29: eight processes claim a fifth of the budget each, at the same moment."""
    workers = [start(f"w{number}", 200) for number in range(8)]
    for worker in workers:
        worker.begin()
    given = sorted(worker.given() for worker in workers)
    assert given == [0, 0, 0, 200, 200, 200, 200, 200]
    assert sum(held(tmp_path).values()) == 1000


def test_a_killed_worker_holds_nothing_a_stopped_one_does(tmp_path: Path, start: Callable[..., Worker]) -> None:
    """L29, L8: by evidence of death, not by silence."""
    first, second = start("first", 600), start("second", 400)
    for worker in (first, second):
        worker.begin()
        worker.given()
    os.kill(second.process.pid, signal.SIGSTOP)
    assert held(tmp_path) == {"first": 600, "second": 400}
    first.kill()
    third = start("third", 5000)
    third.begin()
    assert third.given() == 600
    assert held(tmp_path) == {"second": 400, "third": 600}


def test_the_cgroup_is_read_by_the_first_only(tmp_path: Path) -> None:
    """L29: a later reader would see the first one's memory as used."""
    reads: list[int] = []

    def limit() -> int:
        reads.append(1000 // (len(reads) + 1))
        return reads[-1]

    budget = HostBudget(tmp_path / "made" / "when needed", limit)
    assert budget.claim("a", 300) == 300
    assert budget.claim("b", 300) == 300
    assert budget.claim("c", 600) == 400
    assert reads == [1000]
    assert budget.claim("a", 100) == 100
    assert budget.claim("d", 600) == 200
    for incarnation in "abcd":
        budget.release(incarnation)
    budget.release("nobody")
    assert budget.shares() == ()
    assert budget.claim("e", 1000) == 500


def test_a_pid_that_is_another_process_now_holds_nothing(tmp_path: Path) -> None:
    budget = HostBudget(tmp_path, lambda: 1000)
    own = ProcessIdentity.own()
    budget.claim("earlier process of this pid", 500, replace(own, start_ticks=own.start_ticks - 1))
    budget.claim("earlier boot", 500, replace(own, boot_id="another"))
    assert budget.claim("now", 1000) == 1000
    # Of another container's process nothing is known here, so its share stays.
    budget.claim("now", 100)
    budget.claim("another container", 400, replace(own, pid_namespace="pid:[1]"))
    assert held(tmp_path) == {"now": 100, "another container": 400}


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    budget = HostBudget(tmp_path, lambda: 1000)
    for text in ("{", "[]", json.dumps({"limit_bytes": 5, "shares": [{"incarnation": "a"}]})):
        (tmp_path / "host-tier.json").write_text(text)
        with pytest.raises(BudgetError, match="remove it"):
            budget.claim("a", 1)
    with pytest.raises(BudgetError, match="cannot be claimed"):
        budget.claim("a", -1)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BudgetError, match="another runtime directory"):
        HostBudget(file, lambda: 1).shares()


def test_a_lock_holder_that_is_stopped_stops_nobody_for_long(tmp_path: Path) -> None:
    """L6."""
    budget = HostBudget(tmp_path, lambda: 1000, lock_timeout_s=0.05)
    with budget._locked(), pytest.raises(BudgetError, match="stopped"):
        HostBudget(tmp_path, lambda: 1000, lock_timeout_s=0.05).claim("a", 1)
    assert budget.claim("a", 1) == 1
