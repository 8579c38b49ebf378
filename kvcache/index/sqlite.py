"""The embedded index: one SQLite file in WAL mode, shared by the processes of a machine, with a dict in front.

A dict miss asks SQLite. A dict hit may be stale, since another process may have moved or dropped the row: the reader's
verification then misses (L3), it hands the row to `remove_many`, and the next lookup asks SQLite again.

A row is keyed by the first 8 bytes of its key as SQLite's integer key, its fastest kind of lookup, and holds the other
24. Two keys that agree in 64 bits replace one another, which is a miss: 0.03 % likely to have happened at all among
10⁸ keys. Groups and tenants are numbered.

Every step of a statement gives up the interpreter lock and asks for it again, which beside a busy thread takes up to
5 ms: 500 rows put one by one took 1.5 s there (measured). So rows go in by the hundred per step, and come back as one
JSON text (sqlite_rows.py).

Writes sync (synchronous=FULL): a store puts rows once per group commit, so that costs one sync in about 64 MiB, and a
power cut loses no row of an entry that was called durable. A damaged or deleted file is replaced by an empty one with
another generation (sqlite_file.py), and refilled from the records.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from headrace.kvcache.index.base import Index, IndexRow, IndexStats, check_row
from headrace.kvcache.index.sqlite_file import Memory, Session, SqliteFile, boot_id
from headrace.kvcache.index.sqlite_rows import StoredRow, delete, id_of, insert, pack, select, unpack
from headrace.kvcache.keys import Key

DEFAULT_CACHED_ROWS = 200_000
"""About 74 MB of rows in front of SQLite."""

_BATCH = 500
_SCAN_BATCH = 2_000


class SqliteIndex(Index):
    """An index in the file `path`. `monotonic` is the machine's clock: all processes of a boot read the same one."""

    def __init__(
        self,
        path: Path,
        *,
        cached_rows: int = DEFAULT_CACHED_ROWS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = SqliteFile(path, monotonic)
        self._monotonic = monotonic
        self._boot = boot_id()
        self._cached_rows = cached_rows

    # Rows

    def put_many(self, rows: Sequence[IndexRow], deadline: float) -> None:
        for row in rows:
            check_row(row)
        if not rows:
            return
        with self._file.writing(deadline) as session:
            db = session.db
            groups = {name: _number(db, "groups", "name", name) for name in {row.group for row in rows}}
            tenants = {tag: _number(db, "tenants", "tag", tag) for tag in {row.tenant_tag for row in rows}}
            packed = [pack(row, groups[row.group], tenants[row.tenant_tag]) for row in _last_of_each(rows)]
            # Neighbours in the tree one after the other: 4 µs a row instead of 7 (measured).
            packed.sort(key=itemgetter(0))
            insert(db, packed)
        self._remember(session.memory, rows)

    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[IndexRow | None]:
        found = list(map(self._file.memory.front.get, keys))
        if all(found):
            return found
        missing = {key for key, row in zip(keys, found, strict=True) if row is None}
        with self._file.reading(deadline) as session:
            fetched = self._fetch(session, missing)
        self._remember(session.memory, fetched.values())
        return [row if row is not None else fetched.get(key) for key, row in zip(keys, found, strict=True)]

    def held(self, keys: Sequence[Key], deadline: float) -> Sequence[IndexRow | None]:
        with self._file.reading(deadline) as session:
            fetched = self._fetch(session, set(keys))
        return [fetched.get(key) for key in keys]

    def remove_many(self, rows: Sequence[IndexRow], deadline: float) -> int:
        if not rows:
            return 0
        wanted = {(row.key, row.group, row.place) for row in rows}
        with self._file.writing(deadline) as session:
            db = session.db
            held = self._select_ids(session, {row.key for row in rows})
            stale = [row for row in held if (row.key, row.group, row.place) in wanted]
            delete(db, [row.key for row in stale])
            _forget_empty(db, {_find(db, "groups", "name", name) for name in {row.group for row in stale}})
        for row in rows:
            session.memory.front.pop(row.key, None)
        return len(stale)

    def drop_group(self, group: str, deadline: float) -> Sequence[IndexRow]:
        with self._file.writing(deadline) as session:
            db = session.db
            gid = _find(db, "groups", "name", group)
            if gid is None:
                return []
            rows = self._rows(session, select(db, "WHERE gid = ?", (gid,)))
            db.execute("DELETE FROM entries WHERE gid = ?", (gid,))
            _forget_empty(db, (gid,))
        for row in rows:
            session.memory.front.pop(row.key, None)
        return rows

    def rows_of(self, group: str, deadline: float) -> Sequence[IndexRow]:
        with self._file.reading(deadline) as session:
            gid = _find(session.db, "groups", "name", group)
            if gid is None:
                return []
            return self._rows(session, select(session.db, "WHERE gid = ?", (gid,)))

    def groups(self, deadline: float) -> Sequence[str]:
        with self._file.reading(deadline) as session:
            return [
                name
                for (name,) in session.db.execute(
                    "SELECT name FROM groups WHERE EXISTS (SELECT 1 FROM entries WHERE entries.gid = groups.id)"
                )
            ]

    def scan(self, deadline: float) -> Iterator[IndexRow]:
        # In steps, so that no reader pins the WAL for the length of a scan.
        first: int | None = None
        while True:
            with self._file.reading(deadline) as session:
                where, arguments = ("", ()) if first is None else ("WHERE id > ?", (first,))
                stored = select(session.db, f"{where} ORDER BY id LIMIT {_SCAN_BATCH}", arguments)
                rows = self._rows(session, stored)
            yield from rows
            if len(stored) < _SCAN_BATCH:
                return
            first = stored[-1].id

    def clear(self, deadline: float) -> None:
        with self._file.writing(deadline) as session:
            session.db.execute("DELETE FROM entries")
            session.db.execute("DELETE FROM groups")
        session.memory.front.clear()

    # Generation and rebuild

    def generation(self, deadline: float) -> str:
        with self._file.reading(deadline) as session:
            return _meta(session.db, "generation")

    def claim_rebuild(self, owner: str, ttl_s: float, deadline: float) -> bool:
        with self._file.writing(deadline) as session:
            if self._lease_holder(session.db) not in ("", owner):
                return False
            _set_meta(session.db, lease_owner=owner, lease_boot=self._boot, lease_end=repr(self._monotonic() + ttl_s))
            return True

    def finish_rebuild(self, owner: str, deadline: float) -> bool:
        with self._file.writing(deadline) as session:
            if not owner or self._lease_holder(session.db) != owner:
                return False
            _set_meta(session.db, lease_owner="", complete="1")
            return True

    def needs_rebuild(self, deadline: float) -> bool:
        with self._file.reading(deadline) as session:
            return _meta(session.db, "complete") != "1"

    def _lease_holder(self, db: sqlite3.Connection) -> str:
        # By the machine's monotonic clock (L8); a lease of an earlier boot is over.
        if _meta(db, "lease_boot") != self._boot or float(_meta(db, "lease_end") or 0) <= self._monotonic():
            return ""
        return _meta(db, "lease_owner")

    # The rest

    def stats(self, deadline: float) -> IndexStats:
        with self._file.reading(deadline) as session:
            (entries,) = session.db.execute("SELECT count(*) FROM entries").fetchone()
            (groups,) = session.db.execute("SELECT count(DISTINCT gid) FROM entries").fetchone()
        return IndexStats(entries=entries, groups=groups, nbytes=self._file.nbytes())

    def close(self) -> None:
        self._file.close()

    def _fetch(self, session: Session, keys: set[Key]) -> dict[Key, IndexRow]:
        return {row.key: row for row in self._select_ids(session, keys) if row.key in keys}

    def _select_ids(self, session: Session, keys: Iterable[Key]) -> Iterator[IndexRow]:
        ids = iter({id_of(key) for key in keys})
        while batch := list(islice(ids, _BATCH)):
            marks = ",".join("?" * len(batch))
            yield from self._rows(session, select(session.db, f"WHERE id IN ({marks})", batch))

    def _rows(self, session: Session, stored: Iterable[StoredRow]) -> list[IndexRow]:
        rows = (self._row(session, each) for each in stored)
        return [row for row in rows if row is not None]

    @staticmethod
    def _row(session: Session, stored: StoredRow) -> IndexRow | None:
        try:
            return unpack(stored, _name(session, stored.gid), _tag(session, stored.tid))
        except (LookupError, TypeError, ValueError):
            return None  # bytes of the file have changed without SQLite's notice: a miss, as every hint that is wrong

    def _remember(self, memory: Memory, rows: Iterable[IndexRow]) -> None:
        front = memory.front
        for row in rows:
            front[row.key] = row
        # Oldest first: a hit does not move a row, which keeps hits free of locks.
        while len(front) > self._cached_rows:
            try:
                front.pop(next(iter(front)), None)
            except (StopIteration, RuntimeError):  # another thread changed it meanwhile, and evicts too
                break


def _name(session: Session, gid: int) -> str:
    names = session.memory.groups
    if gid not in names:
        names[gid] = str(_value(session.db, "SELECT name FROM groups WHERE id = ?", gid))
    return names[gid]


def _tag(session: Session, tid: int) -> bytes:
    tags = session.memory.tenants
    if tid not in tags:
        tags[tid] = bytes(_value(session.db, "SELECT tag FROM tenants WHERE id = ?", tid))
    return tags[tid]


def _last_of_each(rows: Sequence[IndexRow]) -> Iterable[IndexRow]:
    return {row.key: row for row in rows}.values()


def _value(db: sqlite3.Connection, query: str, argument: int) -> Any:
    found = db.execute(query, (argument,)).fetchone()
    if found is None:
        raise LookupError(argument)
    return found[0]


def _find(db: sqlite3.Connection, table: str, column: str, value: str | bytes) -> int | None:
    found = db.execute(f"SELECT id FROM {table} WHERE {column} = ?", (value,)).fetchone()
    return None if found is None else int(found[0])


def _number(db: sqlite3.Connection, table: str, column: str, value: str | bytes) -> int:
    number = _find(db, table, column, value)
    if number is None:
        number = db.execute(f"INSERT INTO {table} ({column}) VALUES (?)", (value,)).lastrowid
        assert number is not None
    return number


def _forget_empty(db: sqlite3.Connection, gids: Iterable[int | None]) -> None:
    # Numbers are never given again (AUTOINCREMENT), so that another process's memory of a name stays right.
    for gid in gids:
        db.execute(
            "DELETE FROM groups WHERE id = ? AND NOT EXISTS (SELECT 1 FROM entries WHERE gid = groups.id)", (gid,)
        )


def _meta(db: sqlite3.Connection, name: str) -> str:
    found = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return "" if found is None else str(found[0])


def _set_meta(db: sqlite3.Connection, **values: str) -> None:
    db.executemany("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", values.items())
