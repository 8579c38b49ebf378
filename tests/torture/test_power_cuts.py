"""The power fails at a random change of the disk. What was acknowledged is there afterwards; nothing else is wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.index.base import IndexUnavailable
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import PutTicket, Store, StoreError
from tests.torture.conftest import Tally, rounds
from tests.torture.disk import PowerDisk
from tests.torture.index import PowerIndex
from tests.torture.oracle import TENANTS, entry, key_of, numbers, tenant_of
from tests.torture.stores import Wall, acknowledged, open_segments, read

CUTS = rounds(200, 24)
ENTRIES = 150
CLASSES = (RetentionClass.CHAT, RetentionClass.AGENT)
CUTS_IN_A_ROW = 3
"""A disk is cut again and again: recovery is cut, too."""


@dataclass
class Promises:
    """What a store said before its power failed."""

    puts: list[tuple[list[Key], PutTicket]] = field(default_factory=list)
    sure: set[Key] = field(default_factory=set)
    """Acknowledged, and not erased since."""
    erased: set[Key] = field(default_factory=set)
    """Must never come again."""
    open: set[Key] = field(default_factory=set)
    """Neither promised nor forbidden: an erasure of them began and did not return. Puts that were on their way when it
    began may be acknowledged and then erased before the power fails."""

    def erase(self, store: Store, tenant: int, below: int) -> None:
        keys = {key_of(number) for number in range(tenant, below, TENANTS)}
        self.open |= keys
        self.settle()
        self.sure -= keys
        store.drop_tenant(tenant_of(tenant))
        self.open -= keys
        self.erased |= keys

    def settle(self) -> None:
        """Count what is durable by now; whatever an erasure covers is none of it, though it was durable for a while."""
        self.sure |= acknowledged(self.puts) - self.erased - self.open
        self.puts = [put for put in self.puts if not put[1].durable.done()]


def work(store: Store, disk: PowerDisk, rng: random.Random, first: int, promises: Promises) -> None:
    """Put entries in chains, read, touch, flush, erase and sweep, until done or the power is off.

    Every third erasure is one in which the power fails."""
    number = first
    while number < first + ENTRIES:
        count = min(rng.randint(1, 12), first + ENTRIES - number)
        entries = [entry(n, retention=rng.choice(CLASSES)) for n in range(number, number + count)]
        number += count
        promises.puts.append(([e.info.key for e in entries], store.put_many(entries)))
        match rng.randrange(24):
            case 0 | 1 | 2 | 3 | 4 | 5:
                store.flush(5.0)
            case 6 | 7 | 8:
                store.collect()
            case 9 | 10 | 11:
                read(store, [key_of(rng.randrange(first, number)) for _ in range(8)])
            case 12 | 13 | 14:
                used = [key_of(n) for n in range(max(first, number - 8), number)]
                store.touch(used, RetentionClass.CHAT, tenant_of(0))
            case 15:
                if rng.random() < 1 / 3:
                    disk.cut_at = disk.changes + rng.randint(1, 40)
                promises.erase(store, rng.randrange(TENANTS), number)
    store.flush(5.0)


@pytest.mark.parametrize("seed", range(-(-CUTS // CUTS_IN_A_ROW)))
def test_power_cuts_lose_nothing_acknowledged(seed: int, tally: Tally) -> None:
    """Show 3 of issue 3, L3, L4; and L25: what was erased stays erased."""
    rng = random.Random(seed)
    wall = Wall()
    disk = PowerDisk(cut_at=rng.randint(1, 400))
    index = PowerIndex(disk, keeps=rng.random() < 0.5)
    promises = Promises()
    for turn in range(CUTS_IN_A_ROW):
        try:
            store = open_segments(disk, index, wall)
        except (OSError, IndexUnavailable, StoreError):
            assert disk.off, "only the power may keep a store from opening"
        else:
            try:
                work(store, disk, rng, turn * ENTRIES, promises)
            except (OSError, IndexUnavailable, StoreError):
                assert disk.off
            with disk.lock_:
                disk.off = True
            store.close()
        promises.settle()

        disk.off = True
        next_disk = disk.after_power_cut(rng)
        index = index.after_power_cut(next_disk, rng)
        disk = next_disk
        check(disk, index, wall, promises, (turn + 1) * ENTRIES, tally)
        disk.cut_at = disk.changes + rng.randint(1, 400)
        tally.add("power cuts", cuts=1)
    check(disk, PowerIndex(disk, keeps=True), wall, promises, CUTS_IN_A_ROW * ENTRIES, tally)
    tally.add("power cuts", acknowledged=len(promises.sure), erased=len(promises.erased))


def check(disk: PowerDisk, index: PowerIndex, wall: Wall, promises: Promises, written: int, tally: Tally) -> None:
    """Open after a cut: all that is sure comes, all that comes is right, and a scan tells the same."""
    disk.cut_at = None
    store = open_segments(disk, index, wall)
    try:
        store.collect()
        came, misses = read(store, [key_of(number) for number in range(written)])
        lost = promises.sure - came
        assert not lost, f"acknowledged and lost: {numbers(lost, written)}"
        back = promises.erased & came
        assert not back, f"erased and there again: {numbers(back, written)}"
        tally.add("power cuts", read_back=len(came), misses=misses)
        scanned = {found.info.key for found in store.scan()}
        unlisted = promises.sure - scanned
        assert not unlisted, f"acknowledged and not listed: {numbers(unlisted, written)}"
        listed = promises.erased & scanned
        assert not listed, f"erased and listed: {numbers(listed, written)}"
        bad = {key for key, _ in store.verify().bad} & promises.sure
        assert not bad, f"acknowledged and spoiled: {numbers(bad, written)}"
    finally:
        store.close()
