"""The shared index: Redis, one primary (with replicas or not), TLS and ACL as its URL says.

Every call is one or a few pipelined, variadic commands: 1,000 keys take 0.6 ms so, and 7.9 ms one by one. What must not
be half done is a script (redis_scripts.py). A dead server costs its callers one bounded wait and then nothing until it
is probed again (L17).

Contents are trusted for as long as the server runs. A restart, with an empty memory or with an old dump, changes the
generation, and so asks for a rebuild: what the last seconds before it wrote may be gone.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from headrace.kvcache.index.base import Index, IndexRow, IndexStats, IndexUnavailable, check_row
from headrace.kvcache.index.breaker import CircuitBreaker
from headrace.kvcache.index.redis_calls import Command, RedisCalls
from headrace.kvcache.index.redis_rows import FIELD_BYTES, gid_of, pack, unpack, wanted
from headrace.kvcache.index.redis_scripts import CLAIM, CLEAR, DROP, FINISH, PUT, REMOVE
from headrace.kvcache.keys import Key

_SHARDS = 16
"""Hashes that the rows are spread over, so that none grows in one step of many GB. Part of the format."""
_WRITE_BATCH = 500
"""Rows that one script handles: about 1 ms in which the server serves nobody else."""
_READ_BATCH = 1_000
_T = TypeVar("_T")


class RedisIndex(Index):
    """The index called `name` on the server at `url` (redis_calls.py)."""

    def __init__(
        self,
        url: str,
        name: str,
        *,
        breaker: CircuitBreaker | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix = f"headrace:{name}:".encode()
        self._calls = RedisCalls(url, breaker=breaker or CircuitBreaker(monotonic=monotonic), monotonic=monotonic)
        self._shards = [b"%srows:%d" % (self._prefix, shard) for shard in range(_SHARDS)]
        self._names: dict[bytes, str] = {}
        """gid → name; a digest of it, so never wrong."""

    # Rows

    def put_many(self, rows: Sequence[IndexRow], deadline: float) -> None:
        for row in rows:
            check_row(row)
        gids = {group: gid_of(group) for group in {row.group for row in rows}}
        for batch in _batches(rows, _WRITE_BATCH):
            arguments: list[str | bytes | int] = [_SHARDS]
            groups = {row.group for row in batch}
            arguments.append(len(groups))
            for group in groups:
                arguments += (gids[group], group)
            for row in batch:
                arguments += (row.key[:FIELD_BYTES], pack(row, gids[row.group]))
            self._script(PUT, arguments, deadline)

    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[IndexRow | None]:
        fields = [key[:FIELD_BYTES] for key in keys]
        rows = self._read(fields, deadline)
        return [row if row is not None and row.key == key else None for key, row in zip(keys, rows, strict=True)]

    def remove_many(self, rows: Sequence[IndexRow], deadline: float) -> int:
        removed = 0
        for batch in _batches(rows, _WRITE_BATCH):
            arguments: list[str | bytes | int] = [_SHARDS]
            for row in batch:
                arguments += (row.key[:FIELD_BYTES], wanted(row, gid_of(row.group)))
            removed += int(self._script(REMOVE, arguments, deadline))
        return removed

    def drop_group(self, group: str, deadline: float) -> Sequence[IndexRow]:
        rows: list[IndexRow] = []
        left = 1
        while left:
            left, found = self._script(DROP, [_SHARDS, gid_of(group), _WRITE_BATCH], deadline)
            rows += [unpack(field, packed, group) for field, packed in zip(found[::2], found[1::2], strict=True)]
        return rows

    def rows_of(self, group: str, deadline: float) -> Sequence[IndexRow]:
        fields = list(self._calls.one(("SMEMBERS", self._prefix + b"group:" + gid_of(group)), deadline))
        return [row for row in self._read(fields, deadline) if row is not None and row.group == group]

    def groups(self, deadline: float) -> Sequence[str]:
        return [name.decode() for name in self._calls.one(("HVALS", self._prefix + b"names"), deadline)]

    def scan(self, deadline: float) -> Iterator[IndexRow]:
        for shard in self._shards:
            cursor = b"0"
            while True:
                cursor, found = self._calls.one(("HSCAN", shard, cursor, "COUNT", _READ_BATCH), deadline)
                yield from self._rows(found[::2], found[1::2], deadline)
                if cursor == b"0":
                    break

    def clear(self, deadline: float) -> None:
        self._script(CLEAR, [_SHARDS], deadline)

    # Generation and rebuild

    def generation(self, deadline: float) -> str:
        return self._state(deadline)[0]

    def claim_rebuild(self, owner: str, ttl_s: float, deadline: float) -> bool:
        run_id = self._state(deadline)[1]
        milliseconds = max(1, round(ttl_s * 1000))
        return bool(self._script(CLAIM, [_owner(owner), run_id, milliseconds], deadline))

    def finish_rebuild(self, owner: str, deadline: float) -> bool:
        generation, run_id, _ = self._state(deadline)
        return bool(self._script(FINISH, [_owner(owner), run_id, generation], deadline))

    def needs_rebuild(self, deadline: float) -> bool:
        generation, _, complete = self._state(deadline)
        return complete != generation

    def _state(self, deadline: float) -> tuple[str, str, str]:
        """Generation, run id of the server, and the generation that was last rebuilt in full."""
        marker = self._prefix + b"marker"
        _, held, complete, info = self._calls.many(
            [
                ("SET", marker, uuid.uuid4().hex, "NX"),
                ("GET", marker),
                ("GET", self._prefix + b"complete"),
                ("INFO", "server"),
            ],
            deadline,
        )
        run_id = next((line[7:].decode() for line in info.split(b"\r\n") if line.startswith(b"run_id:")), "")
        if held is None or not run_id:
            raise IndexUnavailable(f"{self._calls.shown} lost its contents while it was asked, or tells no run id")
        return f"{held.decode()}-{run_id}", run_id, (complete or b"").decode()

    # The rest

    def wall(self, deadline: float) -> float | None:
        seconds, microseconds = self._calls.one(("TIME",), deadline)
        return int(seconds) + int(microseconds) / 1e6

    def stats(self, deadline: float) -> IndexStats:
        names = self._prefix + b"names"
        gids, *entries = self._calls.many([("HKEYS", names), *(("HLEN", shard) for shard in self._shards)], deadline)
        keys = [names, *self._shards, *(self._prefix + b"group:" + gid for gid in gids)]
        sizes: list[int | None] = []
        for batch in _batches(keys, _READ_BATCH):
            sizes += self._calls.many([("MEMORY", "USAGE", key, "SAMPLES", 20) for key in batch], deadline)
        return IndexStats(entries=sum(entries), groups=len(gids), nbytes=sum(size or 0 for size in sizes))

    def close(self) -> None:
        self._calls.close()

    def _script(self, script: str, arguments: Sequence[str | bytes | int], deadline: float) -> Any:
        # EVAL, not EVALSHA: the text is small beside the rows, and a restarted server needs no second try.
        return self._calls.one(("EVAL", script, 0, self._prefix, *arguments), deadline)

    def _read(self, fields: Sequence[bytes], deadline: float) -> list[IndexRow | None]:
        """Rows by field, in order."""
        rows: dict[bytes, IndexRow] = {}
        for batch in _batches(list(dict.fromkeys(fields)), _READ_BATCH):
            shards: dict[int, list[bytes]] = {}
            for field in batch:
                shards.setdefault(field[0] % _SHARDS, []).append(field)
            commands: list[Command] = [("HMGET", self._shards[shard], *wanted) for shard, wanted in shards.items()]
            asked = [field for wanted in shards.values() for field in wanted]
            answers = [packed for reply in self._calls.many(commands, deadline) for packed in reply]
            there = [(field, packed) for field, packed in zip(asked, answers, strict=True) if packed is not None]
            for row in self._rows([field for field, _ in there], [packed for _, packed in there], deadline):
                rows[row.key[:FIELD_BYTES]] = row
        return [rows.get(field) for field in fields]

    def _rows(self, fields: Sequence[bytes], packed: Sequence[bytes], deadline: float) -> list[IndexRow]:
        """Without those whose group was dropped meanwhile."""
        unknown = list({row[:8] for row in packed if row[:8] not in self._names})
        if unknown:
            names = self._calls.one(("HMGET", self._prefix + b"names", *unknown), deadline)
            self._names.update(
                {gid: name.decode() for gid, name in zip(unknown, names, strict=True) if name is not None}
            )
        known = self._names
        return [unpack(f, p, known[p[:8]]) for f, p in zip(fields, packed, strict=True) if p[:8] in known]


def _owner(owner: str) -> str:
    # The zero byte ends the owner's name inside the lease's value.
    if not owner or "\0" in owner:
        raise ValueError("the owner of a rebuild needs a name without zero bytes")
    return owner + "\0"


def _batches(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
