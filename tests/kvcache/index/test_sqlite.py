"""SqliteIndex beyond the contract: killed processes, damage, loss of the file, the bound of its dict."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from headrace.kvcache.index import sqlite, sqlite_rows
from headrace.kvcache.index.base import IndexUnavailable
from headrace.kvcache.index.sqlite import SqliteIndex
from headrace.kvcache.index.sqlite_file import SqliteFile
from tests.kvcache.index.rows import key, row, soon

WRITER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from headrace.kvcache.index.sqlite import SqliteIndex
    from tests.kvcache.index.rows import row, soon
    index, first = SqliteIndex(Path(sys.argv[1])), int(sys.argv[2])
    for start in range(first, first + 100_000, 25):
        index.put_many([row(number, f"g{first}") for number in range(start, start + 25)], soon())
        sys.stdout.write(f"{start + 25}\\n")
        sys.stdout.flush()
""")


def start_writer(path: Path, first: int) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(first)], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_killed_writers_lose_no_row_that_was_put(tmp_path: Path) -> None:
    """Several processes share the file; SIGKILL of each leaves everything that put_many returned for."""
    path = tmp_path / "index.sqlite"
    index = SqliteIndex(path, cached_rows=0)
    for turn in range(3):
        writers = {first: start_writer(path, first) for first in (turn * 10**6, turn * 10**6 + 500_000)}
        try:
            done = {}
            for first, writer in writers.items():
                assert writer.stdout is not None
                for _ in range(random.Random(first).randint(2, 12)):
                    done[first] = int(writer.stdout.readline())
        finally:
            for writer in writers.values():
                writer.send_signal(signal.SIGKILL)
        for first, writer in writers.items():
            rest, _ = writer.communicate()
            done[first] = max([done[first], *(int(line) for line in rest.splitlines() if line)])
            wanted = [row(number, f"g{first}") for number in range(first, done[first])]
            assert list(index.get_many([r.key for r in wanted], soon())) == wanted
            assert {r.key for r in index.rows_of(f"g{first}", soon())} >= {r.key for r in wanted}
        index.put_many([row(turn)], soon())
    index.close()


def test_rows_survive_closing_and_opening(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    index = SqliteIndex(path)
    index.put_many([row(0)], soon())
    generation = index.generation(soon())
    assert index.claim_rebuild("me", 60, soon())
    assert index.finish_rebuild("me", soon())
    index.close()
    again = SqliteIndex(path)
    assert list(again.get_many([key(0)], soon())) == [row(0)]
    assert again.generation(soon()) == generation
    assert not again.needs_rebuild(soon())
    again.close()
    with pytest.raises(IndexUnavailable):
        again.get_many([key(1)], soon())


def test_the_dict_in_front_is_bounded_and_forgets_no_row(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "index.sqlite", cached_rows=100)
    rows = [row(number) for number in range(1_000)]
    index.put_many(rows, soon())
    assert len(index._file.memory.front) == 100
    assert list(index.get_many([r.key for r in rows], soon())) == rows
    assert len(index._file.memory.front) == 100
    index.close()


def test_who_decides_what_to_write_sees_what_others_wrote(tmp_path: Path) -> None:
    """A row in this process's dict may be stale; `held` asks the file."""
    one, other = SqliteIndex(tmp_path / "index.sqlite"), SqliteIndex(tmp_path / "index.sqlite")
    one.put_many([row(0), row(1)], soon())
    other.put_many([row(0, "g1")], soon())
    other.drop_group("g0", soon())
    assert list(one.get_many([key(0), key(1)], soon())) == [row(0), row(1)]
    assert list(one.held([key(0), key(1), key(2)], soon())) == [row(0, "g1"), None, None]
    one.close()
    other.close()


def test_an_index_file_that_is_deleted_under_its_users_is_a_new_generation(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    one, other = SqliteIndex(path), SqliteIndex(path)
    one.put_many([row(0)], soon())
    assert list(other.get_many([key(0)], soon())) == [row(0)]
    generation = one.generation(soon())
    for file in tmp_path.glob("index.sqlite*"):
        file.unlink()
    assert one.generation(soon()) != generation
    assert other.generation(soon()) == one.generation(soon())
    assert one.needs_rebuild(soon())
    one.put_many([row(1)], soon())
    assert list(other.get_many([key(0), key(1)], soon())) == [None, row(1)]
    one.close()
    other.close()


@pytest.mark.parametrize("cached_rows", [0, 100])
def test_what_a_call_learns_of_a_replaced_file_is_believed_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_rows: int
) -> None:
    """A get has its rows from the old file when it is replaced (L1). Its numbers of groups name others in the new one,
    where rows would be taken for another segment's, and removed as wrong; and a row that it remembers would keep a
    refill from putting it (L24)."""
    index = SqliteIndex(tmp_path / "index.sqlite", cached_rows=cached_rows)
    index.put_many([row(0, "old")], soon())
    index._file.memory.front.clear()
    index._file.memory.groups.clear()

    def replaced_meanwhile(*arguments: object) -> object:
        monkeypatch.undo()
        found = sqlite_rows.select(*arguments)  # type: ignore[arg-type]
        for file in tmp_path.glob("index.sqlite*"):
            file.unlink()
        index.put_many([row(1, "new")], soon())
        return found

    monkeypatch.setattr(sqlite, "select", replaced_meanwhile)
    with contextlib.suppress(IndexUnavailable):
        index.get_many([key(0)], soon())
    assert list(index.get_many([key(0), key(1)], soon())) == [None, row(1, "new")]
    index._file.memory.front.clear()
    assert list(index.get_many([key(0), key(1)], soon())) == [None, row(1, "new")]
    index.close()


@pytest.mark.parametrize("damage", ["garbage", "truncated", "zero bytes", "another release"])
def test_a_damaged_file_is_replaced_and_says_that_it_needs_a_rebuild(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "index.sqlite"
    index = SqliteIndex(path)
    index.put_many([row(number) for number in range(2_000)], soon())
    assert index.claim_rebuild("me", 60, soon())
    assert index.finish_rebuild("me", soon())
    generation = index.generation(soon())
    index.close()
    match damage:
        case "garbage":
            path.write_bytes(random.Random(1).randbytes(1 << 16))
        case "truncated":
            os.truncate(path, 5_000)
        case "zero bytes":
            path.write_bytes(b"")
        case _:
            with sqlite3.connect(path) as db:
                db.execute("PRAGMA user_version = 99")
            db.close()
    again = SqliteIndex(path)
    try:
        found = again.get_many([row(number).key for number in range(2_000)], soon())
    except IndexUnavailable:
        found = again.get_many([row(number).key for number in range(2_000)], soon())
    assert found == [None] * 2_000
    assert again.generation(soon()) != generation
    assert again.needs_rebuild(soon())
    again.put_many([row(7)], soon())
    assert list(again.get_many([key(7)], soon())) == [row(7)]
    again.close()


def test_flipped_bits_in_the_file_are_never_more_than_wrong_hints(tmp_path: Path) -> None:
    """L17: whatever the file says, a lookup answers rows or IndexUnavailable."""
    path = tmp_path / "index.sqlite"
    index = SqliteIndex(path)
    index.put_many([row(number) for number in range(500)], soon())
    index.close()
    whole = path.read_bytes()
    outcomes = {"rows": 0, "unavailable": 0}
    for seed in range(60):
        rng = random.Random(seed)
        damaged = bytearray(whole)
        for _ in range(40):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        for file in tmp_path.glob("index.sqlite*"):
            file.unlink()
        path.write_bytes(damaged)
        try:
            again = SqliteIndex(path, cached_rows=0)
        except IndexUnavailable:
            outcomes["unavailable"] += 1
            continue
        for ask in (
            lambda index=again: index.get_many([key(number) for number in range(500)], soon()),
            lambda index=again: index.rows_of("g0", soon()),
            lambda index=again: list(index.scan(soon())),
            lambda index=again: index.put_many([row(3, "new")], soon()),
            lambda index=again: index.drop_group("g0", soon()),
            lambda index=again: index.stats(soon()),
        ):
            try:
                ask()
                outcomes["rows"] += 1
            except IndexUnavailable:
                outcomes["unavailable"] += 1
        again.close()
    assert outcomes["rows"]
    assert outcomes["unavailable"]


def test_a_lock_held_by_another_process_ends_at_the_deadline(tmp_path: Path) -> None:
    """L6: a writer elsewhere that does not end costs the deadline, and reads go on."""
    path = tmp_path / "index.sqlite"
    index = SqliteIndex(path, cached_rows=0)
    index.put_many([row(0)], soon())
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    impatient = SqliteIndex(path, cached_rows=0)
    try:
        with pytest.raises(IndexUnavailable):
            impatient.put_many([row(1)], impatient._monotonic() + 0.05)
        assert list(impatient.get_many([key(0), key(1)], soon())) == [row(0), None]
    finally:
        holder.execute("ROLLBACK")
        holder.close()
    impatient.put_many([row(1)], soon())
    impatient.close()
    index.close()


def test_a_lease_of_an_earlier_boot_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L8: monotonic time means nothing after a reboot."""
    path = tmp_path / "index.sqlite"
    index = SqliteIndex(path)
    assert index.claim_rebuild("before the reboot", 10_000, soon())
    index.close()
    monkeypatch.setattr("headrace.kvcache.index.sqlite.boot_id", lambda: "another boot")
    after = SqliteIndex(path)
    assert after.claim_rebuild("after", 60, soon())
    after.close()


def test_a_folder_that_cannot_be_used_is_told_by_type(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises((IndexUnavailable, OSError)):
        SqliteFile(tmp_path / "file" / "index.sqlite", lambda: 0.0)
