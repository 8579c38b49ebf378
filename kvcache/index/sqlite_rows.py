"""How rows lie in SQLite, and how many of them move in one step of a statement (sqlite.py says why)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.index.what import WHAT, pack_what
from headrace.kvcache.keys import Key

_ID_BYTES = 8
_LARGEST_INTEGER = (1 << 63) - 1
_PLACE_BYTES = 16
_ROWS_PER_STEP = 128
"""Rows that one statement inserts; what is left over goes in by powers of two, so that few statements are prepared."""
_IDS_PER_STEP = 500
_COLUMNS = "id, rest, gid, place, length, what, tokens, expires_at, tid"
_SELECT = (
    "SELECT json_group_array(json_array(id, hex(rest), gid, CASE typeof(place) WHEN 'blob' THEN hex(place) ELSE place"
    " END, length, what, tokens, expires_at, tid)) FROM (SELECT * FROM entries "
)

Packed = tuple[int, bytes, int, int | bytes, int, int, int, int, int]


class StoredRow(NamedTuple):
    """A row as it comes back; of a damaged file the fields may be anything."""

    id: int
    rest: str
    gid: int
    place: int | str
    length: int
    what: int
    tokens: int
    expires_at: int
    tid: int


def id_of(key: Key) -> int:
    """SQLite's key of a row: the first 8 bytes of the key, signed."""
    return int.from_bytes(key[:_ID_BYTES], "big", signed=True)


def pack(row: IndexRow, gid: int, tid: int) -> Packed:
    place = row.place if row.place <= _LARGEST_INTEGER else row.place.to_bytes(_PLACE_BYTES, "big")
    what, rest = pack_what(row), row.key[_ID_BYTES:]
    return id_of(row.key), rest, gid, place, row.length, what, row.tokens, row.expires_at, tid


def unpack(stored: StoredRow, group: str, tenant_tag: bytes) -> IndexRow:
    """LookupError, TypeError or ValueError if the fields are no row's."""
    key = stored.id.to_bytes(_ID_BYTES, "big", signed=True) + bytes.fromhex(stored.rest)
    place = stored.place if isinstance(stored.place, int) else int(stored.place, 16)
    kind, retention = WHAT[stored.what]
    return IndexRow(key, group, place, stored.length, kind, retention, stored.tokens, stored.expires_at, tenant_tag)


def insert(db: sqlite3.Connection, rows: Sequence[Packed]) -> None:
    """Insert or replace rows of different keys."""
    start, step = 0, _ROWS_PER_STEP
    while start < len(rows):
        while step > len(rows) - start:
            step //= 2
        values = ",".join(("(?,?,?,?,?,?,?,?,?)",) * step)
        db.execute(
            f"INSERT OR REPLACE INTO entries ({_COLUMNS}) VALUES {values}",
            tuple(chain.from_iterable(rows[start : start + step])),
        )
        start += step


def select(db: sqlite3.Connection, where: str, arguments: Sequence[int]) -> list[StoredRow]:
    """The rows that `where` (with ORDER and LIMIT, if any) names."""
    text = db.execute(f"{_SELECT} {where})", arguments).fetchone()[0]
    return [StoredRow(*fields) for fields in json.loads(text)]


def delete(db: sqlite3.Connection, keys: Iterable[Key]) -> None:
    """Delete the rows of these keys."""
    ids = [id_of(key) for key in keys]
    for start in range(0, len(ids), _IDS_PER_STEP):
        batch = ids[start : start + _IDS_PER_STEP]
        db.execute(f"DELETE FROM entries WHERE id IN ({','.join('?' * len(batch))})", batch)
