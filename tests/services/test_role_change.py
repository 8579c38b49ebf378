"""A worker changes its role in its process: real processes, and every answer compared with one engine's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from headrace.v1 import common_pb2, control_pb2
from tests.services.cluster import PATIENCE_S, Cluster
from tests.services.conftest import Offline
from tests.services.driver import attached, make_request, prompt_of, spec_of
from tests.services.lives import begin_change, change, control, ended_change, renew, resources

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
LONG = 1500
CHANGES = 10

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with Cluster(v3_folder, tmp_path_factory.mktemp("roles"), ttl_seconds=0.5) as running:
        yield running


async def test_there_and_back(cluster: Cluster, v3_offline: Offline) -> None:
    """L5, L14, L19: a prefill serves as decode and again as prefill, each time under a new incarnation at its old
    address; what it then gives out is what one engine gives."""
    first, other, decode = [
        await cluster.start(*args) for args in (("prefill",), ("prefill",), ("decode", "stop.close_seconds=2"))
    ]
    lives = {first.replica.incarnation}
    await change(cluster, first, DECODE)
    lives.add(first.replica.incarnation)
    assert first.replica.role.value == "decode"
    async with attached(other, first) as driver:
        request = make_request("as-decode", prompt_of("as-decode", 90), max_tokens=20)
        assert (await driver.generate(request)).tokens == v3_offline.tokens(request)
    await first.until_idle()
    await change(cluster, first, PREFILL)
    lives.add(first.replica.incarnation)
    async with attached(first, decode) as driver:
        request = make_request("as-prefill", prompt_of("as-prefill", 90), max_tokens=20)
        assert (await driver.generate(request)).tokens == v3_offline.tokens(request)
    await cluster.until_idle()
    assert len(lives) == 3


async def test_what_runs_is_finished_or_handed_over(cluster: Cluster, v3_offline: Offline) -> None:
    """L19, L28: of two requests on a decode that changes its role, one ends within the time with all its tokens; the
    other has no credit and is ended UNAVAILABLE, for a router to continue it elsewhere."""
    prefill, decode = await cluster.ensure("prefill"), await cluster.ensure("decode")
    async with attached(prefill, decode) as driver:
        requests = [make_request(name, prompt_of(name, 30), max_tokens=n) for name, n in (("quick", 12), ("stuck", 60))]
        specs = [spec_of(request, decode) for request in requests]
        for spec in specs:
            reserved = await driver.reserve(spec)
            driver.stream.keep(spec.id, credit=5)
            async for _ in driver.run(spec, reserved):
                pass
        await begin_change(decode, PREFILL, wait_ms=3000)
        driver.stream.keep(specs[0].id)
        quick, stuck = [await driver.stream.complete(spec.id) for spec in specs]
        status = await ended_change(decode)
    assert quick.tokens == v3_offline.tokens(requests[0])
    end = stuck.finished[0]
    assert (end.reason, end.error.code) == (common_pb2.FINISH_REASON_ERROR, common_pb2.ERROR_CODE_UNAVAILABLE)
    assert stuck.tokens[0] == v3_offline.tokens(requests[1])[0][: len(stuck.tokens[0])]
    assert status.role_change.state == control_pb2.ROLE_CHANGE_STATE_DONE
    await renew(cluster, decode, status)
    await change(cluster, decode, DECODE)


async def test_memory_that_a_frozen_peer_may_write_is_not_given_back(cluster: Cluster) -> None:
    """L7: a prefill stopped in mid-push may still write into decode's landing region: decode stays what it is, under
    the same incarnation, takes work again, and says why. When the peer is dead the change goes through."""
    frozen, decode = await cluster.start("prefill"), await cluster.ensure("decode")
    incarnation = decode.replica.incarnation
    async with attached(frozen, decode) as driver:
        pushing = await driver.freeze_in_push("frozen", LONG)
        await begin_change(decode, PREFILL, wait_ms=100)
        status = await ended_change(decode)
        assert status.role_change.state == control_pb2.ROLE_CHANGE_STATE_FAILED
        assert status.role_change.error.code == common_pb2.ERROR_CODE_FAILED_PRECONDITION
        assert "may still be written" in status.role_change.error.message
        assert status.replica.peer.incarnation == incarnation
        await frozen.kill()
        await decode.until_idle()
        pushing.call.cancel()  # type: ignore[attr-defined]
    async with attached(await cluster.ensure("prefill"), decode) as driver:
        request = make_request("again", prompt_of("again", 50))
        assert len((await driver.generate(request)).tokens[0]) == request.max_tokens
    await change(cluster, decode, PREFILL)
    await change(cluster, decode, DECODE)


async def test_a_role_that_does_not_come_up_gives_the_old_one_back(cluster: Cluster) -> None:
    """L18: the landing region is too small for one row: prefill again, under another incarnation, and why."""
    worker = await cluster.start("prefill", "roles.decode.decode.landing_bytes=16")
    incarnation = worker.replica.incarnation
    await begin_change(worker, DECODE)
    status = await ended_change(worker)
    assert status.role_change.state == control_pb2.ROLE_CHANGE_STATE_FAILED
    assert "holds no row" in status.role_change.error.message
    assert status.replica.role == PREFILL
    assert status.replica.peer.incarnation != incarnation
    await renew(cluster, worker, status)
    async with attached(worker, await cluster.ensure("decode")) as driver:
        assert len((await driver.generate(make_request("back", prompt_of("back", 40)))).tokens[0]) == 12
    assert await worker.stop() == 0


async def refused(worker: object, role: common_pb2.Role.ValueType) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await begin_change(worker, role)  # type: ignore[arg-type]
    return caught.value


async def test_what_cannot_be_is_refused(cluster: Cluster) -> None:
    """L10: typed, before anything is touched: roles that are none, another precision of the same model, a process that
    drains to its end."""
    worker = await cluster.start("prefill", "roles.decode.load.block_tokens=32")
    for role in (common_pb2.ROLE_ROUTER, common_pb2.ROLE_ENCODER, common_pb2.ROLE_UNSPECIFIED):
        assert (await refused(worker, role)).code() is grpc.StatusCode.INVALID_ARGUMENT
    differs = await refused(worker, DECODE)
    assert differs.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "`load` differs" in (differs.details() or "")
    await begin_change(worker, PREFILL)  # has it already
    assert (await worker.status()).ready
    assert await worker.stop() == 0


async def test_a_drained_worker_takes_work_again(cluster: Cluster) -> None:
    """L18, L19: refused while it drains, served after `resume`, under the same incarnation."""
    prefill, decode = await cluster.ensure("prefill"), await cluster.ensure("decode")
    async with attached(prefill, decode) as driver:
        drained = await control(decode).Drain(control_pb2.DrainRequest(wait_ms=1000), timeout=PATIENCE_S)
        assert drained.live == 0
        request = make_request("resumed", prompt_of("resumed", 30))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await driver.reserve(spec_of(request, decode))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await control(decode).Drain(control_pb2.DrainRequest(resume=True), timeout=PATIENCE_S)
        await control(prefill).Drain(control_pb2.DrainRequest(), timeout=PATIENCE_S)
        await control(prefill).Drain(control_pb2.DrainRequest(resume=True), timeout=PATIENCE_S)
        assert len((await driver.generate(request)).tokens[0]) == request.max_tokens


async def test_many_changes_leave_nothing_behind(cluster: Cluster) -> None:
    """Memory, threads, descriptors and mappings of the process stay level over ten changes with work between them, and
    peers forget its former lives."""
    changing = await cluster.start("prefill", "metrics.enabled=true")
    prefill, decode = await cluster.start("prefill"), await cluster.ensure("decode")
    seen = []
    for index in range(CHANGES + 2):
        role = (DECODE, PREFILL)[index % 2]
        await change(cluster, changing, role)
        pair = (prefill, changing) if role == DECODE else (changing, decode)
        async with attached(*pair) as driver:
            await driver.generate(make_request(f"n{index}", prompt_of(f"n{index}", 300)))
        await changing.until_idle()
        seen.append(resources(changing))
    warm, last = seen[1], seen[-1]
    assert last["rss"] <= warm["rss"] * 1.05, seen
    assert last["threads"] <= warm["threads"] + 2, seen
    assert last["descriptors"] <= warm["descriptors"] + 4, seen
    assert last["mappings"] <= warm["mappings"] * 1.05, seen
    assert changing.process.returncode is None
    await asyncio.gather(prefill.until_idle(), decode.until_idle())
