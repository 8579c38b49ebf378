"""Locks between hosts: one holder, and death by evidence only."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.kvcache.store.threefs.locks import FOLDER, Holder, HostLocks
from headrace.kvcache.store.threefs.names import Names
from tests.kvcache.store.threefs.usrbio_double import fails


def locks_of(root: Path, owner: str = "n-1", alive: Callable[[str], bool] | None = None) -> HostLocks:
    return HostLocks(str(root), Names(), owner, alive)


def entries(root: Path) -> list[str]:
    return os.listdir(root / FOLDER)


def test_one_holder_until_release(tmp_path: Path) -> None:
    first, second = locks_of(tmp_path), locks_of(tmp_path, "n-2")
    held = first.take("a")
    assert held is not None
    assert second.take("a") is None
    assert second.take("b") is not None  # another lock
    first.release(held)
    assert second.take("a") is not None


def test_threads_that_come_together_never_both_have_it(tmp_path: Path) -> None:
    """Both may leave, never both stay."""
    inside: list[int] = []
    most = 0
    wins = 0
    guard = threading.Lock()
    start = threading.Barrier(4)

    def contend(number: int) -> None:
        nonlocal most, wins
        mine = locks_of(tmp_path, f"n-{number}")
        start.wait()
        for _ in range(60):
            held = mine.take("a")
            if held is None:
                continue
            with guard:
                inside.append(number)
                most = max(most, len(inside))
                wins += 1
            with guard:
                inside.remove(number)
            mine.release(held)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert wins > 0
    assert entries(tmp_path) == []


def test_a_killed_process_of_this_machine_gives_way(tmp_path: Path) -> None:
    program = (
        "import sys, time; from headrace.kvcache.store.threefs.locks import HostLocks;"
        "from headrace.kvcache.store.threefs.names import Names;"
        "HostLocks(sys.argv[1], Names(), 'n-9', None).take('a'); print('held', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        assert locks_of(tmp_path).take("a") is None
    finally:
        child.kill()
        # Not waited for yet: a zombie holds no lock either.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    held = locks_of(tmp_path).take("a")
    child.wait()
    child.stdout.close()
    assert held is not None
    assert entries(tmp_path) == [held.name]


def elsewhere(root: Path, **changes: object) -> Holder:
    """The entry of a process on another machine."""
    locks = locks_of(root, "far-7")
    held = locks.take("a")
    assert held is not None
    locks.release(held)
    holder = dataclasses.replace(held, host="0" * 12, **changes)  # type: ignore[arg-type]
    (root / FOLDER / holder.name).touch()
    return holder


def test_another_machines_holder_lives_until_liveness_says_otherwise(tmp_path: Path) -> None:
    """A writer is dead by evidence, never by age (spec/kv_tier.md, Recovery): without a registry nobody is."""
    elsewhere(tmp_path)
    asked: list[str] = []

    def alive(owner: str) -> bool:
        asked.append(owner)
        return len(asked) == 1

    assert locks_of(tmp_path).take("a") is None
    assert locks_of(tmp_path, alive=alive).take("a") is None
    assert locks_of(tmp_path, alive=alive).take("a") is not None
    assert set(asked) == {"far-7"}


def test_a_holder_without_a_name_for_liveness_lives(tmp_path: Path) -> None:
    elsewhere(tmp_path, owner="")
    assert locks_of(tmp_path, alive=lambda owner: False).take("a") is None


def test_a_pid_that_was_used_again_is_no_evidence_of_life(tmp_path: Path) -> None:
    locks = locks_of(tmp_path)
    held = locks.take("a")
    assert held is not None
    locks.release(held)
    (tmp_path / FOLDER / dataclasses.replace(held, started="1").name).touch()
    assert locks.take("a") is not None


class NoUnlink(Names):
    def unlink(self, path: str) -> None:
        raise OSError(107, "Transport endpoint is not connected")


def test_a_lock_given_back_while_the_mount_was_gone_is_free(tmp_path: Path) -> None:
    gone = HostLocks(str(tmp_path), NoUnlink(), "n-1", None)
    held = gone.take("a")
    assert held is not None
    gone.release(held)
    assert entries(tmp_path) == [held.name]
    again = locks_of(tmp_path, "n-2").take("a")
    assert again is not None
    assert entries(tmp_path) == [again.name]


@pytest.mark.parametrize("name", ["", "a~b", "a~b~c~d~x~f~g", "erasures.lock"])
def test_what_is_no_entry_is_ignored(name: str) -> None:
    assert Holder.parse(name) is None


def test_a_failure_leaves_no_entry_that_counts(tmp_path: Path) -> None:
    class Broken(Names):
        calls = 0

        def list(self, path: str) -> list[str]:
            self.calls += 1
            if self.calls == 2:
                raise OSError(5, "Input/output error")
            return list(super().list(path))

    with fails(5):
        HostLocks(str(tmp_path), Broken(), "n-1", None).take("a")
    assert locks_of(tmp_path).take("a") is not None
