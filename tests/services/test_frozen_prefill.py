"""A prefill that is frozen in mid-push wakes when its rows are another request's: the other's tokens are right (L7).

HEADRACE_ROUNDS=100 python -m pytest -n0 tests/services/test_frozen_prefill.py
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from headrace.services.runtime.ids import new_incarnation
from headrace.v1 import common_pb2
from tests.services.cluster import PATIENCE_S, Cluster, WorkerProcess
from tests.services.conftest import Offline
from tests.services.driver import attached, make_request, prompt_of_its_own

pytestmark = pytest.mark.asyncio(loop_scope="session")
ROUNDS = int(os.environ.get("HEADRACE_ROUNDS", "4"))
LONG = 600
"""Prompt tokens: 15 steps of 40."""


async def until_expired(decode: WorkerProcess, rows: int) -> None:
    """The reservation's lease is over: its pool rows are free, its landing rows wait for the frozen sender."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await decode.status()
            if not status.requests.live:
                break
            await asyncio.sleep(0.05)
    assert sum(pool.quarantined for pool in status.pools) in (0, rows)
    assert not status.integrity.problems


async def test_a_frozen_prefill_that_wakes_spoils_nobodys_tokens(
    v3_folder: Path, v3_offline: Offline, tmp_path: Path
) -> None:
    """L1, L6, L7: SIGSTOP in mid-push, the reservation expires, its pool rows are reused by a request that another
    prefill computes, SIGCONT while that one lands or decodes. The pool has room for one of them at a time."""
    dice = random.Random(7)
    async with Cluster(v3_folder, tmp_path, ttl_seconds=60.0) as cluster:
        frozen, other = await cluster.start("prefill"), await cluster.start("prefill")
        decode = await cluster.start("decode", "engine.lease_s=2.5", "engine.kv_bytes=400000")
        routers = [common_pb2.PeerId(replica_id=f"router-{i}", incarnation=new_incarnation()) for i in range(2)]
        quarantined = 0
        async with attached(frozen, decode, routers[0]) as first, attached(other, decode, routers[1]) as second:
            for index in range(ROUNDS):
                pushing = await first.freeze_in_push(f"frozen-{index}", LONG)
                first.stream.forget(pushing.id)
                await until_expired(decode, pushing.rows)
                quarantined += sum(pool.quarantined for pool in (await decode.status()).pools) > 0
                request = make_request(f"next-{index}", prompt_of_its_own(f"next-{index}", LONG), max_tokens=24)
                running = asyncio.ensure_future(second.generate(request))
                await asyncio.sleep(dice.random() * 0.3)
                frozen.send(signal.SIGCONT)
                answer = await running
                assert answer.tokens == v3_offline.tokens(request), index
                *_, last = [response async for response in pushing.call]
                assert last.failed.target_lost, "nobody waits for it any more"
                await decode.until_idle()
        assert quarantined == ROUNDS, "every round froze a sender with rows of its own to write"
        await frozen.until_idle()
