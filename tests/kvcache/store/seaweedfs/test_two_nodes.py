"""Two machines on one cluster and one index."""

from __future__ import annotations

import threading
from typing import Any

from bench.tier_harness.weed import WeedCluster
from headrace.kvcache.entries import Miss
from headrace.kvcache.index.memory import DictIndex
from tests.kvcache.store.entries import OTHER_TENANT, TENANT, consume, keys, prefix, soon
from tests.kvcache.store.seaweedfs.nodes import node, wait_until


def test_what_another_machine_was_writing_is_erased_too(weed: WeedCluster) -> None:
    """L25: an entry that another machine had accepted before the erasure, and indexes after it, goes with the next
    sweep; other tenants' entries stay."""
    index = DictIndex()
    with node(weed, "twins", index) as one, node(weed, "twins", index, sweep_s=0.1) as other:
        uploaded, go = threading.Event(), threading.Event()
        commit = other._writer._commit

        def late(batch: Any) -> None:
            uploaded.set()
            assert go.wait(20.0)
            commit(batch)

        other._writer._commit = late  # type: ignore[method-assign]
        mine, theirs = prefix("a", 3), prefix("b", 3, tenant=OTHER_TENANT)
        tickets = [other.put_many(mine), other.put_many(theirs)]
        assert uploaded.wait(20.0)
        one.drop_tenant(TENANT)
        go.set()
        for ticket in tickets:
            ticket.durable.result(timeout=60.0)
        wait_until(lambda: not any(one.lookup(keys(mine), soon())))
        assert all(isinstance(got, Miss) for got in other.get_many(keys(mine), soon()))
        assert consume(one.get_many(keys(theirs), soon())) == [entry.payload for entry in theirs]


def test_what_one_stored_the_other_does_not_store_again(weed: WeedCluster) -> None:
    index = DictIndex()
    with node(weed, "shared", index) as one, node(weed, "shared", index) as other:
        entries = prefix("a", 3)
        assert all(one.put_many(entries).durable.result(timeout=60.0))
        assert all(other.put_many(entries).durable.result(timeout=60.0))
        assert other.stats().written_bytes == 0
        assert other.stats().refused_known == len(entries)
        assert consume(other.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
