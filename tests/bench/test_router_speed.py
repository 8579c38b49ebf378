"""bench.router_speed: its parts on small sizes; what it prints keeps its names."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import grpc.aio
import pytest

from bench.router_speed import decision_rows
from bench.router_speed_harness import decision, dynamo
from bench.router_speed_harness.mock_worker import TOKEN, MockDecode, MockPrefill
from headrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

DECODE = common_pb2.PeerId(replica_id="Mock-decode-0", incarnation="d")
PREFILL = common_pb2.PeerId(replica_id="Mock-prefill-0", incarnation="p")
ROUTER = common_pb2.PeerId(replica_id="router", incarnation="r")
PATIENCE_S = 60.0


def test_a_decision_counts_at_both_ranks_and_leaves_nothing() -> None:
    """L11: what the bench measures is the service's own accounting, beginnings and ends."""
    scene = decision.Scene(replicas=3, blocks=3000)
    prompts = scene.prompts(long=False)
    for _ in range(4 * decision.LIVE_PER_REPLICA):
        prefill, decode = scene.decide(next(prompts))
        assert prefill in scene.fleet
        assert decode in scene.fleet
    live = sum(scene.fleet.in_flight(rank.id) for rank in scene.decode)
    assert live == decision.LIVE_PER_REPLICA * len(scene.decode)


def test_known_prompts_are_found_where_they_lie() -> None:
    scene = decision.Scene(replicas=4, blocks=3000)
    for chain in (scene.short[0], scene.long[0]):
        match = scene.index.match(chain, None, len(chain))
        assert max(match.device) == len(chain)
    assert (scene.index.match(scene.system, None, 2).device[:4] == decision.SYSTEM_BLOCKS).all()


def test_the_figures_have_the_names_that_are_promised() -> None:
    found = json.loads(json.dumps(decision.asdict(decision.measure(replicas=2, blocks=3000, decisions=20))))
    assert {"rss_mb", "short", "long", "indexed_blocks"} <= found.keys()
    rows = decision_rows(found)
    assert [row["prompt_blocks"] for row in rows] == [decision.SHORT, decision.LONG]
    assert {"per_s", "p50_us", "p99_us", "cpu_p99_us"} <= rows[0].keys()


async def test_mock_workers_speak_the_whole_way() -> None:
    """Reserve, Run with a real Commit, tokens under a credit, the end, and nothing left (L11, L28)."""
    decode, prefill = MockDecode(DECODE), MockPrefill(PREFILL)
    server = grpc.aio.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    outgoing: asyncio.Queue[decode_pb2.AttachRequest] = asyncio.Queue()

    async def messages() -> object:
        while True:
            yield await outgoing.get()

    try:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            outgoing.put_nowait(decode_pb2.AttachRequest(router=ROUTER))
            stream = stub.Attach(messages())  # type: ignore[arg-type]
            assert (await stream.read()).decode == DECODE  # type: ignore[union-attr]
            spec = common_pb2.RequestSpec(
                id=common_pb2.AttemptId(request_id="a", attempt=1),
                prompt_tokens=5,
                stop=common_pb2.StopParams(max_tokens=3),
                router=ROUTER,
            )
            reserved = await stub.Reserve(decode_pb2.ReserveRequest(spec=spec))
            assert decode.live == 1
            credit = decode_pb2.AttachedRequest(id=spec.id, credit_tokens=2)
            outgoing.put_nowait(decode_pb2.AttachRequest(requests=[credit]))
            target = prefill_pb2.DecodeTarget(peer=DECODE, endpoint=endpoint, landing=reserved.landing)
            run = prefill_pb2_grpc.PrefillServiceStub(channel).Run(prefill_pb2.RunRequest(spec=spec, target=target))
            kinds = [response.WhichOneof("event") async for response in run]
            assert kinds == ["accepted", "handed_over"]
            tokens: list[int] = []
            while len(tokens) < 2:
                message = await asyncio.wait_for(stream.read(), PATIENCE_S)
                tokens += [token for one in message.requests for part in one.tokens for token in part.token_ids]  # type: ignore[union-attr]
            assert decode.live == 1  # it waits for credit
            more = decode_pb2.AttachedRequest(id=spec.id, credit_tokens=9)
            outgoing.put_nowait(decode_pb2.AttachRequest(requests=[more]))
            last = await asyncio.wait_for(stream.read(), PATIENCE_S)
            assert [part.token_ids[0] for one in last.requests for part in one.tokens] == [TOKEN]  # type: ignore[union-attr]
            assert last.requests[0].finished[0].completion_tokens == 3  # type: ignore[union-attr]
            assert decode.live == 0
            stream.cancel()
    finally:
        await prefill.close()
        await server.stop(0)


def test_dynamo_is_absent_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(dynamo.DynamoAbsent, match="No module named 'dynamo'"):
        dynamo.measure(sys.executable, tmp_path, 8, 4, 10, 900)
    with pytest.raises(dynamo.DynamoAbsent, match="no-python"):
        dynamo.measure(str(tmp_path / "no-python"), tmp_path, 8, 4, 10, 900)
