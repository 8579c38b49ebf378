"""Records are torn, zeroed, flipped, misplaced and cut off on the disk. A damaged one is a miss; the others come."""

from __future__ import annotations

import os
import random
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.index.sqlite import SqliteIndex
from headrace.kvcache.keys import Key
from headrace.kvcache.store.segments.record import HEADER_BYTES, record_bytes
from tests.torture.conftest import Tally, rounds
from tests.torture.oracle import entry, key_of, numbers
from tests.torture.stores import read, soon
from tests.torture.writer import open_real

RECORDS = rounds(1_500, 300)
DAMAGED = rounds(1_000, 200)
KINDS = ("torn", "zeroed page", "zeroed record", "flipped header", "flipped payload", "misplaced", "truncated")


def fill(directory: Path) -> list[IndexRow]:
    """A closed store with RECORDS records, and where they lie."""
    store = open_real(directory, secrets.token_hex(6))
    for start in range(0, RECORDS, 20):
        ticket = store.put_many([entry(number) for number in range(start, start + 20)])
        assert all(ticket.durable.result(timeout=60.0))
    store.close()
    index = SqliteIndex(directory / "index.sqlite")
    rows = index.get_many([key_of(number) for number in range(RECORDS)], soon())
    index.close()
    found = [row for row in rows if row is not None]
    assert len(found) == RECORDS
    return found


class Damage:
    """Does every kind to records that are still whole; a truncation takes those behind it along."""

    def __init__(self, directory: Path, rows: Sequence[IndexRow], rng: random.Random) -> None:
        self._directory = directory
        self._rng = rng
        self._whole = list(rows)
        rng.shuffle(self._whole)
        self.done: dict[Key, str] = {}

    def one(self, kind: str) -> None:
        row = self._whole.pop()
        path = self._directory / row.group
        record = bytearray(self._read(path, row))
        data_end = HEADER_BYTES + row.length
        rng = self._rng
        match kind:
            case "torn":
                at = rng.randrange(0, data_end - 1) // 512 * 512
                record[at:] = rng.choice([bytes, rng.randbytes])(len(record) - at)
            case "zeroed page":
                at = rng.randrange(0, data_end) // 4096 * 4096
                record[at : at + 4096] = bytes(4096)
            case "zeroed record":
                record[:] = bytes(len(record))
            case "flipped header" | "flipped payload":
                low, high = (0, HEADER_BYTES) if kind == "flipped header" else (HEADER_BYTES, data_end)
                for at in {rng.randrange(low, high) for _ in range(rng.randint(1, 3))}:
                    record[at] ^= 1 << rng.randrange(8)
            case "misplaced":
                other = self._whole[-1]
                moved = self._read(self._directory / other.group, other)[: len(record)]
                record[: len(moved)] = moved
            case "truncated":
                os.truncate(path, row.place + rng.randrange(0, data_end - 1))
                behind = [other for other in self._whole if other.group == row.group and other.place > row.place]
                self._whole = [other for other in self._whole if other not in behind]
                self.done.update({other.key: kind for other in (row, *behind)})
                return
        with path.open("r+b") as file:
            file.seek(row.place)
            file.write(record)
        self.done[row.key] = kind

    @staticmethod
    def _read(path: Path, row: IndexRow) -> bytes:
        with path.open("rb") as file:
            file.seek(row.place)
            return file.read(record_bytes(row.length))


def check(directory: Path, damage: Damage, what: str) -> None:
    store = open_real(directory, secrets.token_hex(6))
    try:
        keys = [key_of(number) for number in range(RECORDS)]
        came, _ = read(store, keys)
        shown = {damage.done[key] for key in came & damage.done.keys()}
        assert not shown, f"{what}: records came that are {shown}"
        whole = set(keys) - damage.done.keys()
        lost = whole - came
        assert not lost, f"{what}: whole records are lost: {numbers(lost, RECORDS)}"
        again, _ = read(store, keys)
        other = again ^ came
        assert not other, f"{what}: not what it was a moment ago: {numbers(other, RECORDS)}"
    finally:
        store.close()


def test_damaged_records_are_misses_and_whole_ones_come(tmp_path: Path, tally: Tally) -> None:
    """Show 3 of issue 3, L3: with the index as it was, refilled from sidecars, from damaged sidecars, from headers."""
    rng = random.Random(5)
    rows = fill(tmp_path)
    damage = Damage(tmp_path, rows, rng)
    # A truncation takes many records along; three of them leave something to the other kinds.
    for _ in range(3):
        damage.one("truncated")
    while len(damage.done) < DAMAGED:
        damage.one(rng.choice(KINDS[:-1]))
    check(tmp_path, damage, "the index as it was")

    forget_index(tmp_path)
    check(tmp_path, damage, "an index refilled from sidecars")

    sidecars = sorted(tmp_path.glob("v1/**/*.idx"))
    assert sidecars
    for sidecar in sidecars:
        data = bytearray(sidecar.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        sidecar.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
    forget_index(tmp_path)
    check(tmp_path, damage, "an index refilled beside damaged sidecars")

    for sidecar in sidecars:
        sidecar.unlink(missing_ok=True)
    forget_index(tmp_path)
    check(tmp_path, damage, "an index refilled from headers")
    for kind, count in Counter(damage.done.values()).items():
        tally.add("damaged records", **{kind: count})
    tally.add("damaged records", all=len(damage.done), read_back_whole=RECORDS - len(damage.done))


def forget_index(directory: Path) -> None:
    for file in directory.glob("index.sqlite*"):
        file.unlink()
