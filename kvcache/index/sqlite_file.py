"""The file under SqliteIndex: connections, deadlines, and what happens when the file is damaged or gone.

One connection writes, a few read; a lock file keeps two processes from creating or replacing the file at once.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.kvcache.index.base import IndexRow, IndexUnavailable
from headrace.kvcache.keys import Key

_FORMAT = 1
_PROGRESS_STEPS = 20_000
"""Steps of SQLite's machine between two looks at the deadline, about 1 ms."""
_WRITER = "PRAGMA cache_size = -32768; PRAGMA wal_autocheckpoint = 8000"
"""Keys are random, so nearly every row of a put changes a page of its own. With SQLite's 2 MiB of cache pages are
spilled in the middle of a put, and a log of 4 MiB is copied into the file after every other put: 44 µs a row at 170,000
rows; so it is 36 µs (measured), for 32 MiB of memory and of disk."""
_DAMAGED = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,  # a fixed statement does not fit the schema that the file tells
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
)
_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What the module raises. It cannot even decode its own message when that quotes a damaged schema."""

_SCHEMA = f"""
BEGIN;
CREATE TABLE groups (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL);
CREATE TABLE tenants (id INTEGER PRIMARY KEY AUTOINCREMENT, tag BLOB UNIQUE NOT NULL);
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, rest BLOB NOT NULL, gid INTEGER NOT NULL, place NOT NULL, length INTEGER NOT NULL,
    what INTEGER NOT NULL, tokens INTEGER NOT NULL, expires_at INTEGER NOT NULL, tid INTEGER NOT NULL
);
CREATE INDEX entries_of_group ON entries (gid);
INSERT INTO meta (name, value) VALUES ('generation', '{{generation}}');
PRAGMA user_version = {_FORMAT};
COMMIT;
"""


def boot_id() -> str:
    """Which boot of the machine this is: monotonic times of another one mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class _Connection(sqlite3.Connection):
    """One that remembers how long it waits for others' locks."""

    busy_ms = 0


@dataclass(frozen=True)
class Memory:
    """What this process remembers of one file. Another file at the same path has another one: its numbers mean other
    names, and a row that came from the old one is not in it."""

    front: dict[Key, IndexRow] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)
    """Names by number."""
    tenants: dict[int, bytes] = field(default_factory=dict)
    """Tags by number."""


@dataclass(frozen=True, slots=True)
class Session:
    """A connection for one call, and what is remembered of the file that it is of: a call that began before the file
    was replaced puts what it learns there, where nobody looks any more."""

    db: sqlite3.Connection
    memory: Memory


class SqliteFile:
    """Connections to `path`, and what is remembered of the file there."""

    def __init__(self, path: Path, monotonic: Callable[[], float]) -> None:
        self._path = path
        self._monotonic = monotonic
        self.memory = Memory()
        """Of the file that is open now."""
        self._write_lock = threading.Lock()
        self._lock = threading.Lock()
        self._readers: list[_Connection] = []
        self._closed = False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._writer, self._identity = self._open(self._monotonic() + 10.0)

    @contextmanager
    def writing(self, deadline: float) -> Iterator[Session]:
        """One transaction, committed and synced at the end. Raises IndexUnavailable."""
        if not self._write_lock.acquire(timeout=max(0.0, deadline - self._monotonic())):
            raise IndexUnavailable("the index is busy with another write; try again later")
        try:
            self._follow_path(deadline)
            db = self._writer
            with self._typed_errors():
                self._set_deadline(db, deadline)
                db.execute("BEGIN IMMEDIATE")
                try:
                    yield Session(db, self.memory)
                    db.execute("COMMIT")
                except BaseException:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                    raise
        finally:
            self._write_lock.release()

    @contextmanager
    def reading(self, deadline: float) -> Iterator[Session]:
        """For statements that need not see the same state of the file. Raises IndexUnavailable."""
        if self._is_replaced():
            with self._write_lock:
                self._follow_path(deadline)
        with self._lock:
            if self._closed:
                raise IndexUnavailable("the index is closed")
            identity, memory = self._identity, self.memory
            db = self._readers.pop() if self._readers else None
        if db is None:
            try:
                db = self._connect()
            except _ERRORS as error:
                if _is_damage(error):
                    self._replace_damaged()
                raise IndexUnavailable(f"{self._path} cannot be opened: {error}") from error
        try:
            with self._typed_errors():
                self._set_deadline(db, deadline)
                yield Session(db, memory)
        finally:
            with self._lock:
                keep = not self._closed and identity == self._identity
                if keep:
                    self._readers.append(db)
            if not keep:
                db.close()

    def nbytes(self) -> int:
        """Bytes on disk, the write-ahead log included."""
        return sum(file.stat().st_size for file in (self._path, self._beside("-wal")) if file.exists())

    def close(self) -> None:
        with self._write_lock, self._lock:
            if self._closed:
                return
            self._closed = True
            for db in (self._writer, *self._readers):
                db.close()
            self._readers.clear()
            self.memory = Memory()

    def _beside(self, suffix: str) -> Path:
        return self._path.with_name(self._path.name + suffix)

    def _connect(self) -> _Connection:
        db = sqlite3.connect(
            self._path, isolation_level=None, check_same_thread=False, cached_statements=64, factory=_Connection
        )
        db.execute("PRAGMA synchronous = FULL")
        return db

    def _open(self, deadline: float) -> tuple[_Connection, tuple[int, int]]:
        try:
            with self._locked_for_creation():
                try:
                    db = self._prepare(deadline)
                except _ERRORS as error:
                    if not _is_damage(error):
                        raise
                    self._discard_file()
                    db = self._prepare(deadline)
                db.executescript(_WRITER)
                return db, self._identity_now()
        except (sqlite3.Error, OSError) as error:
            raise IndexUnavailable(f"{self._path} cannot be opened: {error}") from error

    def _prepare(self, deadline: float) -> _Connection:
        db = self._connect()
        try:
            self._set_deadline(db, deadline)
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, _FORMAT):  # of another release: refilled from the records
                db.close()
                self._discard_file()
                db = self._connect()
                version = 0
            if version == 0:
                db.execute("PRAGMA journal_mode = WAL")
                db.executescript(_SCHEMA.format(generation=uuid.uuid4().hex))
        except BaseException:
            db.close()
            raise
        return db

    def _discard_file(self) -> None:
        for file in (self._path, self._beside("-wal"), self._beside("-shm")):
            file.unlink(missing_ok=True)

    @contextmanager
    def _locked_for_creation(self) -> Iterator[None]:
        with self._beside(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _identity_now(self) -> tuple[int, int]:
        status = os.stat(self._path)
        return status.st_dev, status.st_ino

    def _is_replaced(self) -> bool:
        try:
            return self._identity_now() != self._identity
        except FileNotFoundError:
            return True

    def _follow_path(self, deadline: float) -> None:
        """If the file was deleted or replaced under us, turn to the one that is there now. Holds _write_lock."""
        if self._closed:
            raise IndexUnavailable("the index is closed")
        if not self._is_replaced():
            return
        old = self._writer
        writer, identity = self._open(deadline)
        with self._lock:
            self._writer, self._identity, self.memory = writer, identity, Memory()
            readers, self._readers = self._readers, []
        for db in (old, *readers):
            db.close()

    def _set_deadline(self, db: _Connection, deadline: float) -> None:
        left = deadline - self._monotonic()
        if left <= 0:
            raise IndexUnavailable("no time was left to ask the index")
        # The power of two below, so that it seldom changes.
        wait = 1 << max(0, int(left * 1000).bit_length() - 1)
        if db.busy_ms != wait:
            db.execute(f"PRAGMA busy_timeout = {wait}")
            db.busy_ms = wait
        db.set_progress_handler(lambda: self._monotonic() > deadline, _PROGRESS_STEPS)

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except _ERRORS as error:
            if _is_damage(error):
                self._replace_damaged()
                raise IndexUnavailable(f"{self._path} was damaged and has been replaced by an empty one") from error
            raise IndexUnavailable(f"{self._path}: {error}") from error

    def _replace_damaged(self) -> None:
        # The connections turn to the new file at their next use; processes that see it gone do the same.
        with self._locked_for_creation():
            if not self._is_replaced():
                self._discard_file()


def _is_damage(error: Exception) -> bool:
    if isinstance(error, UnicodeDecodeError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF) in _DAMAGED
