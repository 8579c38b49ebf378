"""A writing process is killed with SIGKILL, at any moment of its life. What it acknowledged is there afterwards."""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from headrace.kvcache.keys import Key
from tests.torture.conftest import Tally, rounds
from tests.torture.oracle import key_of, numbers
from tests.torture.stores import read
from tests.torture.writer import open_real, write_until_killed

KILLS = rounds(200, 16)
PER_WRITER = 10_000
LONGEST_LIFE_S = 0.25
SAMPLE = 300


class Victim:
    """A writer and what it has said."""

    def __init__(self, directory: Path, first: int) -> None:
        # A server process, forked from before any thread was started, makes a writer in milliseconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.torture.writer"])
        self.first = first
        self.opened = False
        self.sure: set[Key] = set()
        self.refused = 0
        ours, theirs = context.Pipe(duplex=False)
        self._reports: Connection = ours
        self._process: BaseProcess = context.Process(
            target=write_until_killed, args=(str(directory), secrets.token_hex(6), first, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def listen(self, until: float) -> None:
        """Take reports until that time (monotonic)."""
        while (left := until - time.monotonic()) > 0:
            try:
                if self._reports.poll(left):
                    self._take()
            except (EOFError, OSError):
                self._process.join(5.0)
                raise AssertionError(f"the writer died by itself, exit status {self._process.exitcode}") from None

    def kill(self) -> None:
        """SIGKILL; then the reports that it sent before."""
        assert self._process.pid is not None
        assert self._process.exitcode is None, "the writer must live until it is killed"
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()
        try:
            while True:
                self._take()
        except (EOFError, OSError):
            self._reports.close()

    def _take(self) -> None:
        report = self._reports.recv()
        if report == "open":
            self.opened = True
            return
        start, outcomes = report
        self.sure |= {key_of(start + place) for place, good in enumerate(outcomes) if good}
        self.refused += outcomes.count(False)


@pytest.mark.timeout(3_600)
def test_killed_writers_lose_nothing_acknowledged(tmp_path: Path, tally: Tally) -> None:
    """Show 3 of issue 3: real process, real files, SIGKILL while it opens, writes, syncs, seals, recovers. Every fourth
    round two writers share the store, and one is killed before the other."""
    rng = random.Random(3)
    sure: set[Key] = set()
    kills = opened = 0
    while kills < KILLS:
        pair = kills % 4 == 3
        victims = [Victim(tmp_path, (kills + place) * PER_WRITER) for place in range(1 + pair)]
        started = time.monotonic()
        if rng.random() < 0.8:
            while not all(victim.opened for victim in victims):
                for victim in victims:
                    victim.listen(time.monotonic() + 0.01)
                assert time.monotonic() < started + 60, "a writer does not open its store"
        now = time.monotonic()
        for victim in victims:
            now += rng.uniform(0.0, LONGEST_LIFE_S)
            victim.listen(now)
            victim.kill()
        fresh = set().union(*(victim.sure for victim in victims))
        sure |= fresh
        kills += len(victims)
        opened += sum(victim.opened for victim in victims)

        older = rng.sample(sorted(sure), min(SAMPLE, len(sure)))
        check(tmp_path, fresh | set(older), kills)
    everything, _ = check(tmp_path, sure, kills)
    tally.add("kills -9", kills=kills, after_opening=opened, acknowledged=len(sure), read_back=len(everything))
    assert opened, "no writer ever came to write"
    assert sure, "no writer ever acknowledged anything"


def check(directory: Path, sure: set[Key], kills: int) -> tuple[set[Key], int]:
    """Open after a kill: all of these come, and are right."""
    store = open_real(directory, secrets.token_hex(6))
    try:
        store.collect()
        came, misses = read(store, sorted(sure))
        assert not sure - came, f"acknowledged and lost: {numbers(sure - came, kills * PER_WRITER)[:50]}"
        return came, misses
    finally:
        store.close()
