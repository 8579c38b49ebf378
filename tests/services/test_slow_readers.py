"""Clients that do not read: they stop themselves, then lose their memory, then their request. Real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest

from bench.two_routers_harness.clients import OPTIONS
from headrace.cli.ask import Answer, gather, token_prompt
from headrace.cli.client import replica_status
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.services.runtime.errors import READER
from headrace.v1 import common_pb2, control_pb2, inference_pb2, inference_pb2_grpc

PATIENCE_S = 120.0
TOKENS = 200
CREDIT = 4
SETS = (
    "load.dtype=float32",
    "load.native_kernels=false",
    f"router.credit_tokens={CREDIT}",
    "engine.max_sequences=1",
    "engine.pause_spill_s=0.5",
    "engine.pause_end_s=6",
)


@pytest.fixture(scope="module")
def cluster(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    spec = ClusterSpec(v3_folder, {"prefill": 1, "decode": 1}, sets=SETS)
    with LocalCluster(spec, run_dir=tmp_path_factory.mktemp("run")) as running:
        yield running


def request(tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt=token_prompt([3 + i % 50 for i in range(20)]),
        # Of every token, so that few events fill the client's window.
        sampling=common_pb2.SamplingParams(seed=1, logprobs=20),
        stop=common_pb2.StopParams(max_tokens=tokens, ignore_eos=True),
    )


def decode(cluster: LocalCluster) -> control_pb2.StatusResponse:
    address = cluster.child("decode-0").address
    assert address is not None
    return replica_status(address, check_integrity=True)


async def until(cluster: LocalCluster, what: str, **counts: int) -> None:
    """Decode's books say so."""
    found = None
    async with asyncio.timeout(PATIENCE_S):
        while found != counts:
            status = await asyncio.to_thread(decode, cluster)
            found = {name: getattr(status.requests, name) for name in counts}
            await asyncio.sleep(0.1)


async def events(call: object) -> AsyncIterator[inference_pb2.GenerateResponse]:
    while (event := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        yield event


def test_who_does_not_read_makes_room_and_is_ended(cluster: LocalCluster) -> None:
    """L12, L28: decode has one slot. The client that stops reading loses it to another one, which has all its tokens.
    At last its request ends RESOURCE_EXHAUSTED and is not tried elsewhere; what was made of it can still be read."""

    async def story() -> tuple[Answer, Answer]:
        async with grpc.aio.insecure_channel(cluster.router, options=OPTIONS) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call, slow = stub.Generate(request(TOKENS), timeout=PATIENCE_S), Answer()
            async for event in events(call):
                slow.take(event)
                if event.HasField("tokens"):
                    break
            other = await asyncio.to_thread(lambda: gather(cluster.client.generate(request(5), timeout_s=PATIENCE_S)))
            await until(cluster, "the slow one has ended", live=0, failed=1)
            async for event in events(call):
                slow.take(event)
            return slow, other

    before = decode(cluster).requests.accepted
    slow, other = asyncio.run(story())
    assert (other.choice(0).reason, len(other.token_ids)) == ("length", 5)
    finished = slow.choice(0).finished
    assert finished is not None
    assert (finished.reason, finished.error.code) == (
        common_pb2.FINISH_REASON_ERROR,
        common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED,
    )
    assert finished.error.field == READER
    assert len(slow.token_ids) == finished.completion_tokens < TOKENS
    assert slow.token_ids[:5] == other.token_ids
    status = decode(cluster)
    assert status.requests.accepted == before + 2
    assert list(status.integrity.problems) == []


def test_who_reads_on_in_time_has_all_tokens(cluster: LocalCluster) -> None:
    """L5: spilled for its slowness, back with its first read, and the same tokens as for a client that reads."""

    async def story() -> Answer:
        async with grpc.aio.insecure_channel(cluster.router, options=OPTIONS) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call, slow = stub.Generate(request(60), timeout=PATIENCE_S), Answer()
            async for event in events(call):
                slow.take(event)
                if len(slow.token_ids) == 1:
                    await asyncio.sleep(2.0)
            return slow

    slow = asyncio.run(story())
    quick = gather(cluster.client.generate(request(60), timeout_s=PATIENCE_S))
    assert (slow.choice(0).reason, slow.token_ids) == ("length", quick.token_ids)
