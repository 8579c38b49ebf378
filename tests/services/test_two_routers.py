"""Two routers over the same decode ranks, real processes around a real etcd: the short form of bench.two_routers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bench.two_routers import PATIENCE_S, QUEUE, RANKS, SLOTS, members, run_once
from bench.two_routers_harness.clients import Round, client, request
from bench.two_routers_harness.processes import EtcdCluster, slots_peak, slots_used
from headrace.cli.client import replica_status
from headrace.v1 import control_pb2, inference_pb2_grpc

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (package etcd-server)")


@pytest.fixture(scope="module")
def cluster(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(v3_folder, tmp_path_factory.mktemp("two_routers"), members()) as running:
        yield running


def peaks(cluster: EtcdCluster) -> list[int]:
    return [slots_peak(cluster.address(name)) for name in cluster.names("decode")]


def router_counts(cluster: EtcdCluster, router: str) -> control_pb2.Conservation:
    return replica_status(cluster.address(router)).requests


async def until_free(cluster: EtcdCluster) -> None:
    """No slot is booked anywhere."""
    async with asyncio.timeout(PATIENCE_S):
        for name in cluster.names("decode"):
            while await asyncio.to_thread(slots_used, cluster.address(name)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.2)


def test_without_a_queue_exactly_what_fits_is_accepted(cluster: EtcdCluster) -> None:
    """L12, L23, L10: 40 of 64 accepted, 24 told to come back, and when they do all have finished; no rank ever had more
    than its 10 slots booked."""
    outcome = asyncio.run(run_once(cluster, 0, "none"))
    assert outcome.holds, outcome
    assert outcome.refused == 24
    assert max(peaks(cluster)) == SLOTS
    routers = [router_counts(cluster, f"router-0-{side}") for side in "ab"]
    assert sum(counts.refused for counts in routers) == outcome.refused + outcome.retries
    assert sum(counts.finished for counts in routers) == sum(counts.accepted for counts in routers) == 64
    assert not any(counts.failed or counts.invalid or counts.unavailable for counts in routers)


def test_a_request_that_is_wrong_in_itself_is_no_failure(cluster: EtcdCluster) -> None:
    """L11: whether it is found so as it is read, or when its place is looked for."""
    router = f"router-{QUEUE}-a"
    before = router_counts(cluster, router)
    wrong = [request("wrong-1", 0), request("wrong-2", 0)]
    wrong[0].sampling.temperature = -1.0
    del wrong[1].prompt.tokens.token_ids[:]
    wrong[1].prompt.tokens.token_ids.extend([20] * 5000)
    with grpc.insecure_channel(cluster.address(router)) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for each in wrong:
            with pytest.raises(grpc.RpcError):
                list(stub.Generate(each, timeout=PATIENCE_S))
    counts = router_counts(cluster, router)
    assert counts.invalid == before.invalid + 2
    assert (counts.accepted, counts.failed) == (before.accepted, before.failed)


def test_with_a_queue_nobody_is_refused(cluster: EtcdCluster) -> None:
    """L12: the same clients, and room for 24 to wait."""
    outcome = asyncio.run(run_once(cluster, QUEUE, "some"))
    assert outcome.holds, outcome
    assert (outcome.refused, outcome.retries) == (0, 0)
    assert max(peaks(cluster)) == SLOTS


def test_a_router_that_dies_frees_what_it_had_booked(cluster: EtcdCluster) -> None:
    """L8, L11: killed with all slots booked, it renews nothing; the other router has them within seconds."""
    dying, other = (f"router-{QUEUE}-{side}" for side in "ab")

    async def fill(router: str, name: str) -> tuple[Round, list[asyncio.Task[None]], asyncio.Event]:
        outcome, let_go = Round(), asyncio.Event()
        count = RANKS * SLOTS
        tasks = [
            asyncio.create_task(client(cluster.address(router), f"{name}-{index}", index, outcome, let_go))
            for index in range(count)
        ]
        async with asyncio.timeout(PATIENCE_S), outcome.changed:
            await outcome.changed.wait_for(lambda: outcome.settled == count)
        return outcome, tasks, let_go

    async def story() -> None:
        await until_free(cluster)
        lost, tasks, _ = await fill(dying, "lost")
        assert lost.accepted == RANKS * SLOTS
        cluster.children[dying].kill()
        await until_free(cluster)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        kept, tasks, let_go = await fill(other, "kept")
        assert kept.accepted == RANKS * SLOTS
        let_go.set()
        await asyncio.gather(*tasks)
        assert kept.finished == RANKS * SLOTS

    asyncio.run(story())
    assert max(peaks(cluster)) == SLOTS
