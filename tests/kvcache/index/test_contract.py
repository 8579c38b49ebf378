"""What every index promises (kvcache/index/base.py), asked of the dict, SQLite, Redis, and Redis with TLS and ACL."""

from __future__ import annotations

import threading
import time

import pytest

from headrace.kvcache.entries import EntryFieldError, EntryKind, RetentionClass
from headrace.kvcache.index.base import MAX_PLACE, Index, IndexUnavailable
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.index.redis import RedisIndex
from tests.kvcache.index.conftest import OpenIndex
from tests.kvcache.index.rows import key, row, soon


def test_get_answers_in_order_with_every_field(index: Index) -> None:
    rows = [
        row(0),
        row(1, place=0, length=1, tokens=1, expires_at=0, tenant_tag=bytes(16)),
        row(2, "v1/ab/pinned/0/n-b-1.seg", MAX_PLACE - 1, kind=EntryKind.SNAPSHOT, retention=RetentionClass.PINNED),
        row(3, "weed/7", 1 << 63, length=(1 << 32) - 1, tokens=(1 << 32) - 1, expires_at=(1 << 32) - 1),
        row(4, "weed/ü", (1 << 64) - 1, retention=RetentionClass.AGENT),
    ]
    index.put_many(rows, soon())
    asked = [key(3), key(9), key(0), key(4), key(2), key(1), key(0)]
    assert list(index.get_many(asked, soon())) == [rows[3], None, rows[0], rows[4], rows[2], rows[1], rows[0]]


def test_nothing_asked_is_nothing_done(index: Index) -> None:
    index.put_many([], soon())
    assert list(index.get_many([], soon())) == []
    assert index.remove_many([], soon()) == 0
    assert list(index.drop_group("never there", soon())) == []
    assert list(index.rows_of("never there", soon())) == []
    assert list(index.groups(soon())) == []
    assert list(index.scan(soon())) == []
    assert index.stats(soon()).entries == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"key": bytes(31)},
        {"group": ""},
        {"place": -1},
        {"place": MAX_PLACE},
        {"length": 0},
        {"length": 1 << 32},
        {"tokens": 0},
        {"expires_at": -1},
        {"tenant_tag": bytes(15)},
    ],
)
def test_an_impossible_row_is_refused_and_nothing_of_its_batch_is_put(index: Index, changes: dict[str, object]) -> None:
    with pytest.raises(EntryFieldError):
        index.put_many([row(0), row(1, **changes)], soon())  # type: ignore[arg-type]
    assert index.stats(soon()).entries == 0


def test_the_last_put_wins_and_moves_the_key_to_its_group(index: Index) -> None:
    index.put_many([row(0, "a"), row(1, "a")], soon())
    index.put_many([row(0, "b", 7)], soon())
    assert list(index.get_many([key(0)], soon())) == [row(0, "b", 7)]
    assert list(index.rows_of("a", soon())) == [row(1, "a")]
    assert list(index.rows_of("b", soon())) == [row(0, "b", 7)]
    assert list(index.drop_group("a", soon())) == [row(1, "a")]
    assert list(index.get_many([key(0), key(1)], soon())) == [row(0, "b", 7), None]
    assert list(index.groups(soon())) == ["b"]


def test_the_last_of_two_rows_for_a_key_in_one_put_wins(index: Index) -> None:
    index.put_many([row(0, "a", 1), row(0, "b", 2)], soon())
    assert list(index.get_many([key(0)], soon())) == [row(0, "b", 2)]
    assert list(index.groups(soon())) == ["b"]
    assert index.stats(soon()).entries == 1


def test_remove_compares_group_and_place(index: Index) -> None:
    index.put_many([row(0, "a", 1), row(1, "a", 2), row(2, "a", 3)], soon())
    stale = [row(0, "b", 1), row(1, "a", 9), row(3, "a", 4)]
    assert index.remove_many(stale, soon()) == 0
    assert all(index.get_many([key(0), key(1), key(2)], soon()))
    # Only group and place are compared: a reader may hold a row of before a field changed.
    assert index.remove_many([row(0, "a", 1, expires_at=5), row(2, "a", 3)], soon()) == 2
    assert list(index.get_many([key(0), key(1), key(2)], soon())) == [None, row(1, "a", 2), None]
    assert index.remove_many([row(1, "a", 2)], soon()) == 1
    assert list(index.groups(soon())) == []


def test_groups_larger_than_a_batch_are_dropped_whole(index: Index) -> None:
    rows = [row(number, "large") for number in range(2_300)]
    index.put_many([*rows, row(5_000, "other")], soon())
    assert {r.key for r in index.scan(soon())} == {r.key for r in rows} | {key(5_000)}
    assert list(index.get_many([r.key for r in rows], soon())) == rows
    assert sorted(index.drop_group("large", soon()), key=lambda r: r.place) == rows
    assert index.get_many([r.key for r in rows], soon()) == [None] * len(rows)
    assert list(index.groups(soon())) == ["other"]


def test_clear_forgets_rows_and_keeps_the_generation(index: Index) -> None:
    before = index.generation(soon())
    assert index.claim_rebuild("me", 60, soon())
    assert index.finish_rebuild("me", soon())
    index.put_many([row(0, "a"), row(1, "b")], soon())
    index.clear(soon())
    assert list(index.get_many([key(0), key(1)], soon())) == [None, None]
    assert list(index.groups(soon())) == []
    assert index.generation(soon()) == before
    assert not index.needs_rebuild(soon())
    index.put_many([row(0, "a")], soon())
    assert list(index.rows_of("a", soon())) == [row(0, "a")]


def test_stats_tell_rows_groups_and_bytes(index: Index) -> None:
    index.put_many([row(number, f"g{number % 3}") for number in range(1_000)], soon())
    stats = index.stats(soon())
    assert (stats.entries, stats.groups) == (1_000, 3)
    assert 50 * 1_000 < stats.nbytes < 2_000 * 1_000


def test_one_rebuilds_and_only_who_still_holds_the_lease_finishes(index: Index) -> None:
    assert index.needs_rebuild(soon()), "a new index cannot know that its store is empty"
    assert index.claim_rebuild("first", 60, soon())
    assert not index.claim_rebuild("second", 60, soon())
    assert index.claim_rebuild("first", 60, soon()), "renewed"
    assert not index.finish_rebuild("second", soon())
    assert index.needs_rebuild(soon())
    assert index.finish_rebuild("first", soon())
    assert not index.needs_rebuild(soon())
    assert not index.finish_rebuild("first", soon()), "the lease is given back"
    assert index.claim_rebuild("second", 60, soon())


def test_a_name_that_begins_like_the_holders_is_somebody_else(index: Index) -> None:
    assert index.claim_rebuild("node-10", 60, soon())
    assert not index.claim_rebuild("node-1", 60, soon())
    assert not index.finish_rebuild("node-1", soon())


def test_a_rebuild_lease_runs_out(index: Index) -> None:
    """L8: a holder that died frees the lease by itself."""
    assert index.claim_rebuild("dead", 0.05, soon())
    end = soon()
    while not index.claim_rebuild("heir", 60, soon()):
        assert time.monotonic() < end
    assert not index.finish_rebuild("dead", soon())
    assert index.finish_rebuild("heir", soon())


def test_another_process_sees_rows_generation_and_lease(open_one: OpenIndex) -> None:
    one, other = open_one(), open_one()
    one.put_many([row(0)], soon())
    assert list(other.get_many([key(0)], soon())) == [row(0)]
    assert one.generation(soon()) == other.generation(soon())
    assert one.claim_rebuild("one", 60, soon())
    assert not other.claim_rebuild("other", 60, soon())
    assert one.finish_rebuild("one", soon())
    assert not other.needs_rebuild(soon())


def test_a_stale_row_heals_once_its_reader_gives_it_back(open_one: OpenIndex) -> None:
    """L3: a cached row may be stale and then costs one verified miss, not one for ever."""
    one, other = open_one(), open_one()
    one.put_many([row(0, "old", 1)], soon())
    [seen] = other.get_many([key(0)], soon())
    assert seen == row(0, "old", 1)
    one.put_many([row(0, "new", 2)], soon())
    assert other.remove_many([seen], soon()) == 0
    assert list(other.get_many([key(0)], soon())) == [row(0, "new", 2)]


def test_threads_put_and_read_at_once(index: Index) -> None:
    failures: list[BaseException] = []

    def work(part: int) -> None:
        try:
            for start in range(0, 200, 20):
                rows = [row(part * 1_000 + start + i, f"g{part}") for i in range(20)]
                index.put_many(rows, soon())
                assert list(index.get_many([r.key for r in rows], soon())) == rows
                assert index.remove_many(rows[:5], soon()) == 5
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert index.stats(soon()).entries == 4 * 150


def test_a_shared_server_tells_its_time(index: Index) -> None:
    """What the sweeper compares its own clock with; on this machine they are the same one."""
    shared = index.wall(soon())
    if isinstance(index, RedisIndex):
        assert shared is not None
        assert abs(shared - time.time()) < 60
    else:
        assert shared is None


def test_a_deadline_that_has_passed_is_unavailable(index: Index) -> None:
    """L6: no call of an index that has to wait for somebody outlives its deadline."""
    if isinstance(index, DictIndex):
        pytest.skip("the dict waits for nobody")
    index.put_many([row(0)], soon())
    passed = time.monotonic() - 1
    with pytest.raises(IndexUnavailable):
        index.put_many([row(1)], passed)
    with pytest.raises(IndexUnavailable):
        index.get_many([key(1)], passed)
    assert list(index.get_many([key(0), key(1)], soon())) == [row(0), None]
