"""The stream between a router and decode: credit, leases, cancels, and going on after a break."""

from __future__ import annotations

import grpc.aio
import pytest

from headrace.services.runtime.errors import Aborted, InvalidArgument, from_rpc_error
from headrace.services.runtime.ids import new_incarnation
from headrace.v1 import common_pb2, decode_pb2
from tests.services.conftest import Offline
from tests.services.driver import Driver, Stream, attached, make_request, prompt_of, spec_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def begin(driver: Driver, spec: common_pb2.RequestSpec, credit: int) -> None:
    """Reserve, grant credit, hand over."""
    reserved = await driver.reserve(spec)
    driver.stream.keep(spec.id, credit)
    async for response in driver.run(spec, reserved):
        assert not response.HasField("failed"), response


async def test_a_request_without_credit_pauses_alone(v3: Driver, v3_offline: Offline) -> None:
    """A slow client stops only itself; more credit, told cumulatively and twice, lets it go on."""
    request = make_request("slow", prompt_of("slow", 20), max_tokens=30)
    spec = spec_of(request, v3.decode)
    await begin(v3, spec, credit=4)
    await v3.stream.until("four tokens", lambda: len(v3.stream.answer(spec.id).tokens.get(0, ())) >= 4)
    other = make_request("quick", prompt_of("quick", 20), max_tokens=30)
    assert (await v3.generate(other)).tokens == v3_offline.tokens(other)
    assert len(v3.stream.answer(spec.id).tokens[0]) == 4
    for _ in range(2):
        v3.stream.keep(spec.id, credit=9)
    await v3.stream.until("nine tokens", lambda: len(v3.stream.answer(spec.id).tokens[0]) >= 9)
    v3.stream.keep(spec.id)
    assert (await v3.stream.complete(spec.id)).tokens == v3_offline.tokens(request)


async def test_a_new_stream_goes_on_where_the_old_one_broke(v3: Driver, v3_offline: Offline) -> None:
    """L15: what was produced meanwhile is sent again from what the router has: no token lost, none twice."""
    request = make_request("broken", prompt_of("broken", 20), max_tokens=30)
    spec = spec_of(request, v3.decode)
    router = common_pb2.PeerId(replica_id="router-2", incarnation=new_incarnation())
    spec.router.CopyFrom(router)
    async with attached(v3.prefill, v3.decode, router) as first:
        await begin(first, spec, credit=12)
        await first.stream.until("some tokens", lambda: len(first.stream.answer(spec.id).tokens.get(0, ())) >= 3)
        kept = list(first.stream.answer(spec.id).tokens[0])
    second = Stream(v3.decode, router)
    second.start_at(spec.id.request_id, 1, {0: kept})
    second.send(decode_pb2.AttachedRequest(id=spec.id, credit_tokens=1 << 20, received_tokens=[len(kept)]), first=True)
    assert (await second.complete(spec.id)).tokens == v3_offline.tokens(request)
    await second.close()
    # The end is kept a while, so that a router that lost its stream at the last moment still learns it.
    third = Stream(v3.decode, router)
    third.send(decode_pb2.AttachedRequest(id=spec.id, received_tokens=[30]), first=True)
    assert (await third.complete(spec.id)).finished[0].completion_tokens == 30
    await third.close()


async def test_unknown_requests_are_told(v3: Driver) -> None:
    """L8: a router learns at once that what it renews is not here."""
    v3.stream.keep(common_pb2.AttemptId(request_id="nobody", attempt=3))
    await v3.stream.until("unknown", lambda: ("nobody", 3) in v3.stream.unknown)


async def test_a_lease_that_nobody_renews_ends(v3: Driver) -> None:
    """L8: the router is gone; its request is cancelled when the lease ends, by decode's own clock (L9)."""
    router = common_pb2.PeerId(replica_id="router-3", incarnation=new_incarnation())
    spec = spec_of(make_request("orphan", prompt_of("orphan", 20), max_tokens=500), v3.decode, router=router)
    before = (await v3.decode.status()).requests.cancelled
    async with attached(v3.prefill, v3.decode, router) as driver:
        await begin(driver, spec, credit=8)
    status = await v3.decode.until_idle()
    assert status.requests.cancelled == before + 1


@pytest.mark.parametrize(
    "reason", [common_pb2.FINISH_REASON_CANCELLED, common_pb2.FINISH_REASON_DEADLINE], ids=["cancelled", "deadline"]
)
async def test_a_router_ends_a_request(v3: Driver, reason: common_pb2.FinishReason.ValueType) -> None:
    """L28: one terminal event per choice with the router's reason, then the report."""
    spec = spec_of(make_request(f"ended{reason}", prompt_of("ended", 20), max_tokens=500, n=2), v3.decode)
    await begin(v3, spec, credit=8)
    v3.stream.send(cancels=[decode_pb2.AttachCancel(id=spec.id, reason=reason)])
    answer = await v3.stream.complete(spec.id)
    assert {choice: event.reason for choice, event in answer.finished.items()} == {0: reason, 1: reason}
    assert all(answer.finished[choice].completion_tokens == len(answer.tokens[choice]) for choice in (0, 1))


async def test_a_newer_stream_replaces_the_older(v3: Driver) -> None:
    """One stream per router: the older one is told so."""
    router = common_pb2.PeerId(replica_id="router-4", incarnation=new_incarnation())
    async with attached(v3.prefill, v3.decode, router) as older, attached(v3.prefill, v3.decode, router):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await older.stream.task
        assert isinstance(from_rpc_error(caught.value), Aborted)


async def test_a_stream_says_who_it_is(v3: Driver) -> None:
    """A stream that names no router is refused."""
    stream = Stream(v3.decode, common_pb2.PeerId())
    stream.send(first=True)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.task
    assert isinstance(from_rpc_error(caught.value), InvalidArgument)
    await stream.close()
