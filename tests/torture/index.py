"""An index that loses its power with the disk.

One like SQLite keeps what its calls have returned for, and at random the rows of a put that the power cut; one like
Redis keeps at random what it was told since the last sync, and says at its next start that it may have lost rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from headrace.kvcache.index.base import Index, IndexRow, IndexStats, IndexUnavailable
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.keys import Key
from tests.torture.disk import PowerDisk

_T = TypeVar("_T")


class PowerIndex(Index):
    """A DictIndex whose changes are sure at once (`keeps`), or at the disk's next datasync."""

    def __init__(self, disk: PowerDisk, sure: Sequence[IndexRow] = (), *, keeps: bool, complete: bool = False) -> None:
        self._disk = disk
        self._keeps = keeps
        self._inner = DictIndex()
        self._inner.put_many(sure, 0)
        if complete:
            self._inner.claim_rebuild("before", 60, 0)
            self._inner.finish_rebuild("before", 0)
        self._sure = DictIndex()
        self._sure.put_many(sure, 0)
        self._since: list[Callable[[DictIndex], object]] = []
        disk.on_sync = self._sync

    def after_power_cut(self, disk: PowerDisk, rng: random.Random) -> PowerIndex:
        """The index of the next start, on that disk."""
        share = rng.choice([0.0, 0.5, 1.0])
        for change in self._since:
            if rng.random() < share:
                change(self._sure)
        complete = self._keeps and not self._inner.needs_rebuild(0)
        return PowerIndex(disk, list(self._sure.scan(0)), keeps=self._keeps, complete=complete)

    def put_many(self, rows: Sequence[IndexRow], deadline: float) -> None:
        rows = list(rows)
        # Row by row: a power cut keeps some of them.
        self._change(
            [lambda index, row=row: index.put_many([row], 0) for row in rows],  # type: ignore[misc]
            lambda: self._inner.put_many(rows, deadline),
        )

    def get_many(self, keys: Sequence[Key], deadline: float) -> Sequence[IndexRow | None]:
        return self._ask(lambda: self._inner.get_many(keys, deadline))

    def remove_many(self, rows: Sequence[IndexRow], deadline: float) -> int:
        rows = list(rows)
        return self._change([lambda index: index.remove_many(rows, 0)], lambda: self._inner.remove_many(rows, deadline))

    def drop_group(self, group: str, deadline: float) -> Sequence[IndexRow]:
        return self._change([lambda index: index.drop_group(group, 0)], lambda: self._inner.drop_group(group, deadline))

    def rows_of(self, group: str, deadline: float) -> Sequence[IndexRow]:
        return self._ask(lambda: self._inner.rows_of(group, deadline))

    def groups(self, deadline: float) -> Sequence[str]:
        return self._ask(lambda: self._inner.groups(deadline))

    def scan(self, deadline: float) -> Iterator[IndexRow]:
        return self._ask(lambda: self._inner.scan(deadline))

    def generation(self, deadline: float) -> str:
        return self._ask(lambda: self._inner.generation(deadline))

    def claim_rebuild(self, owner: str, ttl_s: float, deadline: float) -> bool:
        return self._ask(lambda: self._inner.claim_rebuild(owner, ttl_s, deadline))

    def finish_rebuild(self, owner: str, deadline: float) -> bool:
        return self._ask(lambda: self._inner.finish_rebuild(owner, deadline))

    def needs_rebuild(self, deadline: float) -> bool:
        return self._ask(lambda: self._inner.needs_rebuild(deadline))

    def clear(self, deadline: float) -> None:
        self._change([lambda index: index.clear(0)], lambda: self._inner.clear(deadline))

    def stats(self, deadline: float) -> IndexStats:
        return self._ask(lambda: self._inner.stats(deadline))

    def close(self) -> None:
        pass

    def _ask(self, call: Callable[[], _T]) -> _T:
        with self._disk.lock_:
            if self._disk.off:
                raise IndexUnavailable("the power is off")
            return call()

    def _change(self, changes: Sequence[Callable[[DictIndex], object]], call: Callable[[], _T]) -> _T:
        with self._disk.lock_:
            self._since.extend(changes)
            try:
                self._disk.change()
            except OSError as error:
                raise IndexUnavailable("the power is off") from error
            if self._keeps:
                self._sync()
            return call()

    def _sync(self) -> None:
        for change in self._since:
            change(self._sure)
        self._since.clear()
