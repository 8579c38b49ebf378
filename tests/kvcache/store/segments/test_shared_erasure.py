"""Erasures by one process of a store while another one writes (L25): each race, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from headrace.kvcache.entries import Miss
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.settings import SegmentSettings
from tests.kvcache.store.contract import durable
from tests.kvcache.store.entries import NAMESPACE, OTHER_TENANT, TENANT, block, consume, keys, soon

_T = TypeVar("_T")
Drop = Callable[[SegmentStore], object]
DROPS: list[Drop] = [lambda store: store.drop_tenant(TENANT), lambda store: store.drop_namespace(NAMESPACE)]


class Pair:
    """Two processes' stores on the same files and index."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = DictIndex()
        self.writer, self.eraser = self.open("a"), self.open("b")

    def open(self, boot: str, index: DictIndex | None = None) -> SegmentStore:
        settings = SegmentSettings(
            node="n",
            boot=boot,
            segment_bytes=1 << 20,
            queue_bytes=16 << 20,
            read_buffer_bytes=4 << 20,
            read_threads=2,
            sync_idle_s=0.005,
            sweep_s=1e9,
            tick_s=1e9,
        )
        return SegmentStore(PosixFileLayer(self.root), index or self.index, settings)

    def close(self) -> None:
        self.writer.close()
        self.eraser.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    stores = Pair(tmp_path / "store")
    yield stores
    stores.close()


def before(call: Callable[..., _T], first: Callable[[], object]) -> Callable[..., _T]:
    """`call`, in front of which `first` happens once."""
    waiting = [first]

    def called(*arguments: object, **named: object) -> _T:
        if waiting:
            waiting.pop()()
        return call(*arguments, **named)

    return called


def after(call: Callable[..., _T], then: Callable[[], object], happened: Callable[[_T], bool]) -> Callable[..., _T]:
    """`call`, behind which `then` happens once, when it first answers so."""
    waiting = [then]

    def called(*arguments: object, **named: object) -> _T:
        answer = call(*arguments, **named)
        if waiting and happened(answer):
            waiting.pop()()
        return answer

    return called


def assert_gone(pair: Pair, wanted: Sequence[bytes]) -> None:
    """In both processes, and when the index was lost."""
    for store in (pair.writer, pair.eraser):
        assert all(isinstance(found, Miss) for found in consume(store.get_many(wanted, soon())))
    pair.close()
    rebuilt = pair.open("c", DictIndex())
    assert all(isinstance(found, Miss) for found in consume(rebuilt.get_many(wanted, soon())))
    rebuilt.close()


@pytest.mark.parametrize("drop", DROPS)
def test_what_was_read_to_be_written_again_is_not_written_after_its_erasure(pair: Pair, drop: Drop) -> None:
    """A refresh or a pin has read the old copy when another process erases it. Its segment is not made yet, so no fence
    covers what it writes."""
    entries = [block("a", number) for number in range(3)]
    durable(pair.eraser, entries)
    rewriter = pair.writer._parts.rewriter
    rewriter._read = after(rewriter._read, lambda: drop(pair.eraser), bool)  # type: ignore[method-assign]
    assert pair.writer.pin(keys(entries)) == 0
    assert pair.writer.stats().failed_writes == {"dropped": 3}
    assert_gone(pair, keys(entries))


@pytest.mark.parametrize("drop", DROPS)
def test_what_was_accepted_before_an_erasure_by_another_process_is_not_written(pair: Pair, drop: Drop) -> None:
    entries = [block("a", number) for number in range(3)]
    durable(pair.eraser, [block("b", 0)])
    writer = pair.writer._parts.writer
    writer._segment = before(writer._segment, lambda: drop(pair.eraser))  # type: ignore[method-assign]
    ticket = pair.writer.put_many(entries)
    assert pair.writer.flush(20)
    assert all(ticket.accepted)
    assert ticket.durable.result(timeout=60) == (False,) * 3
    assert pair.writer.stats().failed_writes == {"dropped": 3}
    assert_gone(pair, keys(entries))


@pytest.mark.parametrize("drop", DROPS)
def test_a_copy_made_while_the_erasure_is_written_is_erased(pair: Pair, drop: Drop) -> None:
    """It became durable behind the eraser's look at segments and before its log said anything."""
    entries = [block("a", number) for number in range(3)]
    durable(pair.eraser, entries)
    pinned: list[int] = []
    log = pair.eraser._parts.erasures
    log.erase = before(log.erase, lambda: pinned.append(pair.writer.pin(keys(entries))))  # type: ignore[method-assign]
    drop(pair.eraser)
    assert pinned == [3]
    assert_gone(pair, keys(entries))


def test_an_erasure_costs_nothing_that_came_after_it(pair: Pair) -> None:
    """A process learns of it before it accepts, whether it ran already or not."""
    durable(pair.writer, [block("a", 0), block("b", 0, tenant=OTHER_TENANT)])
    pair.eraser.drop_tenant(TENANT)
    third = pair.open("d")
    again = [block("a", 0), block("a", 1)]
    durable(third, again)
    assert consume(third.get_many(keys(again), soon())) == [entry.payload for entry in again]
    assert third.lookup(keys([block("b", 0)]), soon()) == [True]
    durable(pair.writer, [block("a", 2)])
    third.close()
