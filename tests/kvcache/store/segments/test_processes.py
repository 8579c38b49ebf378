"""Several real processes on one store directory and one SQLite index: shared, killed, adopted, erased."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.kvcache.store.contract import closing
from tests.kvcache.store.entries import TENANT, block, consume, keys, soon
from tests.kvcache.store.segments._process import open_shared

REPOSITORY = Path(__file__).parents[4]


class Process:
    """One child."""

    def __init__(self, directory: Path, chain: str) -> None:
        environment = dict(os.environ, PYTHONPATH=str(REPOSITORY), PYTHONSAFEPATH="1")
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.kvcache.store.segments._process", str(directory), chain],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.answer() == ["open"]

    def tell(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()

    def answer(self) -> list[str]:
        assert self.child.stdout is not None
        return self.child.stdout.readline().split()

    def ask(self, line: str) -> list[str]:
        self.tell(line)
        return self.answer()

    def kill(self) -> list[list[str]]:
        """SIGKILL; what it had said by then."""
        assert self.child.stdout is not None
        self.child.send_signal(signal.SIGKILL)
        said = [line.split() for line in self.child.stdout.read().splitlines()]
        self.child.wait()
        return said


@contextmanager
def process(directory: Path, chain: str) -> Iterator[Process]:
    child = Process(directory, chain)
    try:
        yield child
    finally:
        child.child.kill()
        child.child.communicate()


def test_a_killed_process_loses_nothing_that_was_durable(tmp_path: Path) -> None:
    """Two write, one is killed at a random moment; the third seals and indexes what it left, and all read it."""
    rng = random.Random(5)
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_shared(tmp_path)))
        store.collect()
        victim, other = (stack.enter_context(process(tmp_path, chain)) for chain in ("victim", "other"))
        assert other.ask("put 10") == ["durable", "0", "10"]
        for _ in range(40):
            victim.tell("put 5")
        durable_to = 0
        for _ in range(rng.randint(2, 8)):
            durable_to = int(victim.answer()[2])
        for said in victim.kill():
            if said[:1] == ["durable"] and len(said) == 3:
                durable_to = int(said[2])
        assert durable_to >= 10
        assert other.ask("put 10") == ["durable", "10", "20"]
        report = store.collect()
        assert not report.refused
        assert report.adopted_segments >= 1
        entries = [block("victim", number) for number in range(durable_to)]
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
        assert other.ask(f"read victim {durable_to}") == ["read", str(durable_to), "0", "0"]
        mine = [block("other", number) for number in range(20)]
        assert consume(store.get_many(keys(mine), soon())) == [entry.payload for entry in mine]
        assert store.verify().bad == ()


def test_an_erasure_holds_in_every_process_at_once(tmp_path: Path) -> None:
    """L25: when drop_tenant returns nobody reads what was erased, whatever rows their index caches hold."""
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_shared(tmp_path)))
        first, second = (stack.enter_context(process(tmp_path, chain)) for chain in ("first", "second"))
        assert first.ask("put 10") == ["durable", "0", "10"]
        assert second.ask("read first 10") == ["read", "10", "0", "0"]
        dropped = store.drop_tenant(TENANT)
        assert dropped.blocks == 10
        for child in (first, second):
            assert child.ask("read first 10") == ["read", "0", "10", "0"]
        assert second.ask("put 5") == ["durable", "0", "5"]
        assert first.ask("read second 5") == ["read", "5", "0", "0"]
