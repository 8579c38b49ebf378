"""Workers that share SeaweedFS and an index in Redis, both of which die under them (L5, L6, L17; Shows 4)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.tier_harness.processes import Server, ServerMissing, redis_server
from bench.tier_harness.weed import WeedCluster
from headrace.engine.request import RequestKey, TrafficClass
from headrace.v1 import control_pb2, control_pb2_grpc
from tests.services import tiny
from tests.services.cluster import PATIENCE_S, WorkerProcess
from tests.services.driver import prompt_of
from tests.services.test_tier import ask, durable, usage_of, workers

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[WeedCluster, Server]]:
    try:
        weed, redis = WeedCluster(tmp_path / "weed"), redis_server(tmp_path / "redis")
    except ServerMissing as error:
        pytest.skip(str(error))
    try:
        redis.start()
        weed.start()
        redis.wait_until_it_listens()
        yield weed, redis
    finally:
        weed.stop()
        redis.kill()


async def until_stored(worker: WorkerProcess, blocks: int) -> None:
    """Wait until a worker's store finds so many blocks."""
    stub = control_pb2_grpc.ControlServiceStub(worker.channel)
    held = -1
    for _ in range(int(PATIENCE_S / 0.1)):
        answer = await stub.CacheStats(control_pb2.CacheStatsRequest(), timeout=PATIENCE_S)
        (held,) = (tier.blocks for tier in answer.tiers if tier.tier == control_pb2.CACHE_TIER_STORE)
        if held == blocks:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the store finds {held} blocks, not {blocks}\n{worker.tail()}")


async def test_requests_go_on_while_the_shared_tier_dies_and_hit_when_it_is_back(
    v3_folder: Path, v3_offline: Any, tmp_path: Path, servers: tuple[WeedCluster, Server]
) -> None:
    """Without Redis every request is computed, with the tokens of one process. All processes and a volume server are
    killed, Redis comes back empty, new workers refill it: the whole prefix is loaded."""
    weed, redis = servers
    store = (f"cache.store=seaweedfs://{weed.master.address}", f"cache.index=redis://{redis.address}/0")
    first = ask("shared1", prompt_of("tier", 170), max_tokens=40)
    expected = v3_offline.tokens(first)
    async with workers(v3_folder, tmp_path, *store) as (cluster, driver):
        before = await driver.generate(first)
        assert before.tokens == expected
        for worker in cluster.workers:
            await durable(worker)
        blocks = (170 + 40 - 1) // tiny.BLOCK
        await until_stored(cluster.workers[0], blocks)
        redis.kill()
        other = ask("other", prompt_of("meanwhile", 100))
        answer = await driver.generate(other)
        assert answer.tokens == v3_offline.tokens(other)
        assert usage_of(answer, 100).loaded_tokens == 0
        await cluster.until_idle()
        for worker in cluster.workers:
            await worker.kill()
    weed.volumes[0].kill()
    weed.wait_for(2)
    redis.start()
    redis.wait_until_it_listens()
    more = (*first.prompt_ids, *before.tokens[0], *prompt_of("next", 30))
    second = ask("shared2", more, traffic=TrafficClass.BATCH)
    async with workers(v3_folder, tmp_path, *store) as (cluster, driver):
        await until_stored(cluster.workers[0], blocks)
        answer = await driver.generate(replace(second, key=RequestKey("shared3", 1)))
        assert answer.tokens == v3_offline.tokens(second)
        assert usage_of(answer, 240).loaded_tokens == blocks * tiny.BLOCK
        await cluster.until_idle()
