"""The refill of an index that lost its contents (kvcache/store/rebuild.py)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from headrace.kvcache.entries import EntryKind, RetentionClass
from headrace.kvcache.index.base import IndexRow, IndexUnavailable
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.rebuild import Rebuilder, RebuildState

FAR = 1e12
NOW = 1_000.0


def row(number: int, expires_at: int = 5_000, group: str = "g") -> IndexRow:
    return IndexRow(
        key=number.to_bytes(32, "big"),
        group=group,
        place=number,
        length=100,
        kind=EntryKind.BLOCK,
        retention=RetentionClass.CHAT,
        tokens=128,
        expires_at=expires_at,
        tenant_tag=bytes(16),
    )


def rebuilder(index: DictIndex, rows: list[IndexRow], owner: str = "a", **more: object) -> Rebuilder:
    return Rebuilder(index, lambda: iter(rows), owner=owner, wall=lambda: NOW, batch=7, **more)  # type: ignore[arg-type]


def test_refills_an_empty_index_and_says_so() -> None:
    index = DictIndex()
    rows = [row(n) for n in range(50)]
    work = rebuilder(index, rows)
    assert work.run_once()
    assert index.get_many([r.key for r in rows], FAR) == rows
    assert not index.needs_rebuild(FAR)
    assert (work.progress.state, work.progress.rows, work.progress.added) == (RebuildState.COMPLETE, 50, 50)
    assert work.run_once()
    assert work.progress.rebuilds == 1


def test_what_lives_longer_stays() -> None:
    """Rows that came meanwhile, and the longest-lived of several copies of a record, win; expired records are left."""
    index = DictIndex()
    index.put_many([row(1, 9_000, "new"), row(2, 4_000, "old"), row(3, 0, "pinned")], FAR)
    rows = [row(1, 5_000), row(2, 5_000), row(3, 8_000), row(4, 5_000, "early"), row(4, 6_000, "late"), row(5, 999)]
    rebuilder(index, rows).run_once()
    found = index.get_many([n.to_bytes(32, "big") for n in range(1, 6)], FAR)
    assert [r.group if r else None for r in found] == ["new", "g", "pinned", "late", None]


def test_one_is_elected_and_the_other_goes_on() -> None:
    index = DictIndex()
    inside, go = threading.Event(), threading.Event()

    def slow() -> Iterator[IndexRow]:
        yield row(1)
        inside.set()
        assert go.wait(20)

    first = Rebuilder(index, slow, owner="first")
    second = rebuilder(index, [row(2)], owner="second")
    thread = threading.Thread(target=first.run_once)
    thread.start()
    assert inside.wait(20)
    assert not second.run_once()
    assert second.progress.state is RebuildState.ELSEWHERE
    go.set()
    thread.join(20)
    assert second.run_once()
    assert second.progress.state is RebuildState.COMPLETE
    assert index.get_many([row(2).key], FAR) == [None]


def test_an_elected_one_that_dies_is_followed_by_another() -> None:
    """L8: by its lease's end."""
    now = [0.0]
    index = DictIndex(monotonic=lambda: now[0])
    assert index.claim_rebuild("killed", 30.0, FAR)
    work = rebuilder(index, [row(1)], owner="next")
    assert not work.run_once()
    assert work.progress.state is RebuildState.ELSEWHERE
    now[0] += 31.0
    assert work.run_once()
    assert index.get_many([row(1).key], FAR) == [row(1)]


@pytest.mark.parametrize("error", [StoreError("volume 3 is away"), IndexUnavailable("no Redis")])
def test_a_broken_rebuild_is_tried_again(error: Exception) -> None:
    """L17: neither a dead index nor unreadable records end the watch; the index stays incomplete until one succeeds."""
    index = DictIndex()
    tries: list[int] = []

    def rows() -> Iterator[IndexRow]:
        tries.append(1)
        yield row(1)
        if len(tries) == 1:
            raise error

    work = Rebuilder(index, rows, owner="a")
    assert not work.run_once()
    assert work.progress.state is RebuildState.FAILED
    assert str(error) in work.progress.failure
    assert index.needs_rebuild(FAR)
    assert work.run_once()


def test_contents_lost_again_begin_anew() -> None:
    index = DictIndex()
    lost: list[int] = []

    def rows() -> Iterator[IndexRow]:
        yield from (row(n) for n in range(20))
        if not lost:
            lost.append(1)
            index.lose()

    work = Rebuilder(index, rows, owner="a", wall=lambda: NOW, batch=7)
    assert not work.run_once()
    assert index.needs_rebuild(FAR)
    assert work.run_once()
    assert len(list(index.scan(FAR))) == 20


def test_settle_runs_after_the_last_row_and_before_completion() -> None:
    index = DictIndex()

    def erase() -> None:
        assert index.needs_rebuild(FAR)
        index.remove_many([row(3)], FAR)

    rebuilder(index, [row(n) for n in range(5)], settle=erase).run_once()
    assert index.get_many([row(3).key, row(4).key], FAR) == [None, row(4)._replace()]


def test_the_watch_notices_and_stops() -> None:
    index = DictIndex()
    done = threading.Event()
    work = Rebuilder(index, lambda: iter([row(1)]), owner="a", settle=done.set, poll_s=60)
    work.start()
    assert done.wait(20)
    index.lose()
    done.clear()
    while not done.wait(0.05):  # the first rebuild may still be finishing when it is noticed
        work.notice()
    work.close()


def test_a_closed_one_gives_its_lease_up() -> None:
    """L8: whoever opens the store next refills at once, and does not serve misses until a lease runs out."""
    now = [100.0]
    index = DictIndex(monotonic=lambda: now[0])

    def rows() -> Iterator[IndexRow]:
        yield row(1)
        raise StoreError("the disk went away")

    first = Rebuilder(index, rows, owner="first", wall=lambda: NOW, batch=1)
    assert not first.run_once()
    second = rebuilder(index, [row(1)], owner="second")
    assert not second.run_once()
    assert second.progress.state is RebuildState.ELSEWHERE
    first.close()
    now[0] += 0.01
    assert second.run_once()
