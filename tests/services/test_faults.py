"""Leaving, cancelling and dying at every stage of a hand-over: everything is given back, exactly once (L7, L10)."""

from __future__ import annotations

import signal

import grpc.aio
import pytest

from headrace.services.runtime.errors import Aborted, from_rpc_error
from headrace.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from tests.services.cluster import PATIENCE_S, Cluster, WorkerProcess
from tests.services.conftest import Offline
from tests.services.driver import Driver, attached, make_request, prompt_of, spec_of

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = 1500
"""Prompt tokens that take many steps of 40."""


@pytest.mark.parametrize("stage", ["accepted", "progress", "handed_over"])
async def test_a_client_that_leaves_frees_everything(v3: Driver, stage: str) -> None:
    """L7, L10: the stream is closed at a stage and the reservation released; both pools are empty afterwards."""
    spec = spec_of(make_request(f"leaves-{stage}", prompt_of(stage, LONG), max_tokens=300), v3.decode)
    reserved = await v3.reserve(spec)
    v3.stream.keep(spec.id, credit=3)
    call = v3.run(spec, reserved)
    async for response in call:
        if response.WhichOneof("event") == stage:
            break
    call.cancel()  # type: ignore[attr-defined]
    assert await v3.release(spec.id)
    await v3.prefill.until_idle()
    await v3.decode.until_idle()


async def test_a_run_can_be_cancelled_by_name(v3: Driver) -> None:
    """For a router that has lost the stream; the run says that it ended."""
    spec = spec_of(make_request("by-name", prompt_of("by-name", LONG)), v3.decode)
    reserved = await v3.reserve(spec)
    stub = prefill_pb2_grpc.PrefillServiceStub(v3.prefill.channel)
    responses = []
    async for response in v3.run(spec, reserved):
        if response.HasField("accepted"):
            found = await stub.Cancel(prefill_pb2.PrefillServiceCancelRequest(id=spec.id), timeout=PATIENCE_S)
            assert found.found
        responses.append(response)
    assert responses[-1].failed.error.code == common_pb2.ERROR_CODE_CANCELLED
    assert not responses[-1].failed.target_lost
    again = await stub.Cancel(prefill_pb2.PrefillServiceCancelRequest(id=spec.id), timeout=PATIENCE_S)
    assert not again.found
    await v3.release(spec.id)


async def test_the_same_run_twice_is_refused(v3: Driver, v3_offline: Offline) -> None:
    """L16: the second call is ABORTED and does not take the first one's rows with it."""
    request = make_request("twice-run", prompt_of("twice-run", 700))
    spec = spec_of(request, v3.decode)
    reserved = await v3.reserve(spec)
    v3.stream.keep(spec.id)
    first = v3.run(spec, reserved)
    async for response in first:
        if response.HasField("accepted"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in v3.run(spec, reserved):
                    pass
            assert isinstance(from_rpc_error(caught.value), Aborted)
        last = response
    assert last.HasField("handed_over")
    assert (await v3.stream.complete(spec.id)).tokens == v3_offline.tokens(request)


async def test_a_reservation_that_is_gone_ends_the_run(v3: Driver) -> None:
    """L10: decode refuses the commit; the run says that a new reservation is needed."""
    # Released before, and short: who waits for its last word calls a long run off.
    spec = spec_of(make_request("gone", prompt_of("gone", 40)), v3.decode)
    reserved = await v3.reserve(spec)
    await v3.release(spec.id)
    async for response in v3.run(spec, reserved):
        last = response
    assert last.failed.target_lost
    assert last.failed.error.code == common_pb2.ERROR_CODE_NOT_FOUND


async def quarantined(worker: WorkerProcess) -> int:
    status = await worker.status()
    return sum(pool.quarantined for pool in status.pools)


async def test_a_stopped_sender_is_alive_and_a_killed_one_is_dead(v3_mortal: Cluster) -> None:
    """L6, L14: a frozen prefill leaves the registry, yet what it may still write stays in quarantine; when the process
    is gone the rows are free. Afterwards a new prefill serves."""
    prefill, decode = await v3_mortal.ensure("prefill"), await v3_mortal.ensure("decode")
    async with attached(prefill, decode) as driver:
        frozen = await driver.freeze_in_push("frozen", LONG)
        await v3_mortal.gone(prefill)
        await driver.release(frozen.id)
        await decode.until_logged("a sender left the registry")
        assert await quarantined(decode) == frozen.rows
        await prefill.kill()
        await decode.until_idle()
        frozen.call.cancel()  # type: ignore[attr-defined]
        driver.prefill = await v3_mortal.ensure("prefill")
        request = make_request("after", prompt_of("after", 50))
        assert len((await driver.generate(request)).tokens[0]) == request.max_tokens


async def test_a_dead_decode_fails_the_run_and_holds_nothing(v3_mortal: Cluster) -> None:
    """L7, L15: the run fails with target_lost; rows at prefill are unpinned once the wire is quiet."""
    prefill, decode = await v3_mortal.ensure("prefill"), await v3_mortal.ensure("decode")
    async with attached(prefill, decode) as driver:
        spec = spec_of(make_request("orphaned", prompt_of("orphaned", LONG)), decode)
        reserved = await driver.reserve(spec)
        last = prefill_pb2.RunResponse()
        async for response in driver.run(spec, reserved):
            if response.HasField("progress") and decode.process.returncode is None:
                await decode.kill()
            last = response
        assert last.failed.target_lost, last
    await prefill.until_idle()


async def test_a_drained_decode_finishes_what_it_has(v3_mortal: Cluster, v3_offline: Offline) -> None:
    """L19: SIGTERM: new reservations are refused, the running request gets all of its tokens, exit status 0."""
    prefill, decode = await v3_mortal.ensure("prefill"), await v3_mortal.ensure("decode")
    async with attached(prefill, decode) as driver:
        request = make_request("drained", prompt_of("drained", 30), max_tokens=40)
        spec = spec_of(request, decode)
        reserved = await driver.reserve(spec)
        driver.stream.keep(spec.id, credit=5)
        async for _ in driver.run(spec, reserved):
            pass
        decode.send(signal.SIGTERM)
        refusal = None
        while refusal is None:
            try:
                other = spec_of(make_request("refused", prompt_of("refused", 9)), decode)
                await driver.reserve(other)
                await driver.release(other.id)
            except grpc.aio.AioRpcError as error:
                refusal = error
        assert refusal.code() is grpc.StatusCode.UNAVAILABLE
        driver.stream.keep(spec.id)
        assert (await driver.stream.complete(spec.id)).tokens == v3_offline.tokens(request)
    assert await decode.stop() == 0
