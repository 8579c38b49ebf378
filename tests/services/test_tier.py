"""Prefixes that outlive their worker: loaded from the store and from host memory by real processes (L5, L17, L27)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.request import CacheScope, EngineRequest, RequestKey, TrafficClass
from headrace.engine.sampling_params import SamplingParams
from headrace.v1 import common_pb2, control_pb2, control_pb2_grpc
from tests.services import tiny
from tests.services.cluster import PATIENCE_S, Cluster, WorkerProcess
from tests.services.driver import Answer, Driver, attached, make_request, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="session")
SCOPE = CacheScope(b"tests of the tier" + bytes(15), b"tenant tag 16 by")


@pytest.fixture(params=["v3", "v41"])
def family(request: pytest.FixtureRequest) -> Any:
    """(name, folder, offline) of each family."""
    name = request.param
    return name, request.getfixturevalue(f"{name}_folder"), request.getfixturevalue(f"{name}_offline")


def keep_of(name: str, offline: Any) -> int:
    """K of V4.1, and the one token that V3 computes for its logits."""
    layout = offline.engine.pool.layout
    return layout.window + 2 * layout.backtracking if name == "v41" else 1


def ask(name: str, prompt: Any, **changes: Any) -> EngineRequest:
    return make_request(name, prompt, **{"cache": SCOPE, **changes})


@asynccontextmanager
async def workers(folder: Path, scratch: Path, *sets: str) -> AsyncIterator[tuple[Cluster, Driver]]:
    """A prefill and a decode worker whose tier takes every gain."""
    async with Cluster(folder, scratch) as cluster:
        sets = ("cache.min_load_tokens=0", "cache.break_even=false", "cache.load_deadline_ms=20000", *sets)
        prefill, decode = await asyncio.gather(*(cluster.start(role, *sets) for role in ("prefill", "decode")))
        async with attached(prefill, decode) as driver:
            yield cluster, driver


async def durable(worker: WorkerProcess) -> control_pb2.TierStats:
    """Wait until everything that was offered is copied and on the disk; the store's figures."""
    await worker.until_idle()
    stub = control_pb2_grpc.ControlServiceStub(worker.channel)
    for _ in range(int(PATIENCE_S / 0.05)):
        answer = await stub.CacheStats(control_pb2.CacheStatsRequest(), timeout=PATIENCE_S)
        (store,) = (tier for tier in answer.tiers if tier.tier == control_pb2.CACHE_TIER_STORE)
        if not store.queued_entries:
            return store
        await asyncio.sleep(0.05)
    raise AssertionError(f"never durable: {store}")


def common(first: EngineRequest, answer: Answer, second: EngineRequest) -> int:
    """m: length of the common token prefix with an earlier turn's prompt + output."""
    known = (*first.prompt_ids, *answer.tokens[0])
    pairs = zip(known, second.prompt_ids, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(known), len(second.prompt_ids)))


async def test_prefixes_outlive_their_workers(family: Any, tmp_path: Path) -> None:
    """L5, L17, L27, Shows 1: the next turn loads what decode gave to the store; after kill -9 of every process all of
    its prefix is loaded; greedy and seeded tokens equal those of one process that computes everything; damaged records
    cost computing and nothing else. BATCH reads and never writes."""
    name, folder, offline = family
    store = f"cache.store=file://{tmp_path}/store"
    first = ask("tier1", prompt_of("tier", 170), max_tokens=40)
    async with workers(folder, tmp_path, store, "cache.host_bytes=4MiB") as (cluster, driver):
        before = await driver.generate(first)
        assert before.tokens == offline.tokens(first)
        stored = [await durable(worker) for worker in cluster.workers]
        assert all(each.written_bytes for each in stored)
        more = (*first.prompt_ids, *before.tokens[0], *prompt_of("next", 30))
        second = ask("tier2", more, traffic=TrafficClass.BATCH)
        m = common(first, before, second)
        assert m == 210
        bound = tiny.BLOCK * ((m - keep_of(name, offline)) // tiny.BLOCK)
        expected = offline.tokens(second)
        answer = await driver.generate(second)
        assert answer.tokens == expected
        usage = usage_of(answer, 240)
        assert usage.cached_tokens + usage.loaded_tokens >= bound
        assert usage.loaded_tokens > 0
        await loads_from_peers(driver, more)
        again = [await durable(worker) for worker in cluster.workers]
        assert [each.written_bytes for each in again] == [each.written_bytes for each in stored]
        for worker in cluster.workers:
            await worker.kill()
    async with workers(folder, tmp_path, store) as (cluster, driver):
        third = ask("tier3", more, sampling=SamplingParams(temperature=0.9, top_p=0.95), seed=5, n=2)
        answer = await driver.generate(third)
        assert answer.tokens == offline.tokens(third)
        usage = usage_of(answer, 240)
        assert usage.loaded_tokens >= bound
        assert (usage.cached_tokens, usage.loaded_tokens % tiny.BLOCK) == (0, 0)
        assert answer.report is not None
        layout = offline.engine.pool.layout
        blocks = usage.loaded_tokens // tiny.BLOCK
        assert answer.report.prefill.loaded_bytes == blocks * layout.block_bytes + layout.snapshot_bytes
        answer = await driver.generate(replace(second, key=RequestKey("tier4", 1)))
        assert answer.tokens == expected
        usage = usage_of(answer, 240)
        assert usage.cached_tokens >= bound
        assert usage.loaded_tokens == 0
        await cluster.until_idle()
        assert await asyncio.gather(*(worker.stop() for worker in cluster.workers)) == [0, 0]
    if name == "v41":
        return
    damage(tmp_path / "store")
    async with workers(folder, tmp_path, store) as (cluster, driver):
        answer = await driver.generate(replace(second, key=RequestKey("tier5", 1)))
        assert answer.tokens == expected
        assert usage_of(answer, 240).loaded_tokens < bound
        await cluster.until_idle()


async def loads_from_peers(driver: Driver, prompt: tuple[int, ...]) -> None:
    """What decode has in host memory comes from there; a peer that is slow to answer is not waited for (L17), so the
    first tries may go to the store."""
    stub = control_pb2_grpc.ControlServiceStub(driver.prefill.channel)
    until = time.monotonic() + PATIENCE_S
    for attempt in count():
        answer = await stub.CacheStats(control_pb2.CacheStatsRequest(), timeout=PATIENCE_S)
        hits = {tier.tier: tier.hit_tokens for tier in answer.tiers}
        if hits[control_pb2.CACHE_TIER_HOST]:
            return
        assert time.monotonic() < until, f"nothing was ever read from host memory: {answer}"
        await stub.ClearCache(
            control_pb2.ClearCacheRequest(everything=True, tiers=[control_pb2.CACHE_TIER_DEVICE]), timeout=PATIENCE_S
        )
        await driver.generate(ask(f"peer{attempt}", prompt, traffic=TrafficClass.BATCH))


def usage_of(answer: Answer, prompt: int) -> common_pb2.Usage:
    """L27: every token of the prompt is counted once."""
    assert answer.report is not None
    usage = answer.report.usage
    assert usage.cached_tokens + usage.loaded_tokens + usage.computed_tokens == usage.prompt_tokens == prompt
    return usage


def damage(store: Path) -> None:
    """Flip bytes all over every segment, behind its first record's header."""
    for segment in store.rglob("*.seg"):
        data = bytearray(segment.read_bytes())
        for at in range(5000, len(data), 512):
            data[at] ^= 0xFF
        segment.write_bytes(data)
