"""Two routers over the same decode ranks, real processes around a real etcd: the short form of bench.two_routers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.two_routers import PATIENCE_S, QUEUE, RANKS, SLOTS, members, run_once
from bench.two_routers_harness.clients import Round, client
from bench.two_routers_harness.processes import EtcdCluster, slots_peak, slots_used

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (package etcd-server)")


@pytest.fixture(scope="module")
def cluster(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(v3_folder, tmp_path_factory.mktemp("two_routers"), members()) as running:
        yield running


def peaks(cluster: EtcdCluster) -> list[int]:
    return [slots_peak(cluster.address(name)) for name in cluster.names("decode")]


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
