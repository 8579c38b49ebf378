"""A process that writes to a store until it is killed, and says what was acknowledged."""

from __future__ import annotations

import os
import random
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.index.sqlite import SqliteIndex
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.segments.engine import SegmentStore
from tests.torture.oracle import entry, key_of
from tests.torture.stores import read, settings


def open_real(directory: Path, boot: str) -> SegmentStore:
    """A store of real files and SQLite, which several processes may share."""
    return SegmentStore(PosixFileLayer(directory), SqliteIndex(directory / "index.sqlite"), settings(boot=boot))


def report(reports: Connection, start: int, outcomes: Future[tuple[bool, ...]]) -> None:
    """Tell the parent; without one there is nothing to live for."""
    try:
        reports.send((start, outcomes.result()))
    except OSError:
        os._exit(1)


def write_until_killed(directory: str, boot: str, first: int, reports: Connection) -> None:
    """Puts entries first, first + 1, … and sends (first of a put, outcomes) once they are durable. Ends only if the
    parent does."""
    rng = random.Random(boot)
    store = open_real(Path(directory), boot)
    reports.send("open")
    number = first
    waiting: list[Future[tuple[bool, ...]]] = []
    while True:
        count = rng.randint(1, 10)
        start, number = number, number + count
        ticket = store.put_many([entry(n, retention=RetentionClass.CHAT) for n in range(start, number)])
        ticket.durable.add_done_callback(partial(report, reports, start))
        waiting = [each for each in (*waiting, ticket.durable) if not each.done()]
        if len(waiting) > 8 or rng.random() < 0.1:
            waiting[0].result() if waiting else store.flush(5.0)
        if rng.random() < 0.05:
            read(store, [key_of(rng.randrange(first, number)) for _ in range(8)])
        if rng.random() < 0.05:
            store.collect()
