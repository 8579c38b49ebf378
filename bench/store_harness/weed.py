"""SeaweedFS with two copies: figures for comparison, on one machine that runs all its servers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.store_harness.cases import Case, entries, payload_pattern
from bench.tier_harness.processes import ServerMissing
from bench.tier_harness.weed import WeedCluster
from headrace.kvcache.entries import Loaded
from headrace.kvcache.index.sqlite import SqliteIndex
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import Store
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.seaweedfs.store import SeaweedStore

_PUT = 64
_GET = 64
_DEADLINE_S = 120.0


class WeedAbsent(Exception):
    """SeaweedFS cannot be measured here; the message says why."""


@dataclass(frozen=True)
class WeedFigures:
    """Record bytes a second, as everywhere in this benchmark."""

    write: float
    """Durable on both of its servers."""
    read: float
    """Verified; from the servers' page cache, if they have it."""


def measure(directory: Path, case: Case) -> WeedFigures:
    """A master and three volume servers of its own. Raises WeedAbsent."""
    try:
        cluster = WeedCluster(directory / "weed")
    except ServerMissing as error:
        raise WeedAbsent(str(error)) from error
    try:
        try:
            cluster.start()
        except RuntimeError as error:
            raise WeedAbsent(str(error)) from error
        settings = SeaweedSettings(masters=(cluster.master.address,))
        store = SeaweedStore(settings, SqliteIndex(directory / "weed.sqlite"))
        try:
            return _measure(store, case)
        finally:
            store.close()
    finally:
        cluster.stop()


def _measure(store: Store, case: Case) -> WeedFigures:
    chain = entries(case, payload_pattern(case.payload))
    started = time.perf_counter()
    for start in range(0, case.count, _PUT):
        ticket = store.put_many(chain[start : start + _PUT])
        if not all(ticket.durable.result(timeout=_DEADLINE_S)):
            raise WeedAbsent("an entry was not stored")
    wrote = case.total / (time.perf_counter() - started)
    keys = [entry.info.key for entry in chain]
    started = time.perf_counter()
    for start in range(0, case.count, _GET):
        _get(store, keys[start : start + _GET])
    return WeedFigures(wrote, case.total / (time.perf_counter() - started))


def _get(store: Store, keys: Sequence[Key]) -> None:
    for result in store.get_many(keys, time.monotonic() + _DEADLINE_S):
        if not isinstance(result, Loaded):
            raise WeedAbsent(f"an entry did not come: {result.value}")
        result.release()
