"""The router process itself: requests that it passes, CPU for each token event, what it adds to a streamed answer."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter, sleep

import grpc.aio

from bench._progress import Advance
from bench.overhead_harness.cpu import CpuTimes
from bench.router_speed_harness.clients import FrontDoor, Seen, StraightToWorkers, channel, closed_loop
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc

VOCABULARY = 240
"""Token ids are drawn below this, so that one prompt suits every model here."""
FIRST_ID = 3


@dataclass(frozen=True)
class Passed:
    """A closed loop of requests with one token each."""

    clients: int
    requests: int
    requests_per_s: float
    """As measured, on a machine that may be shared."""
    router_cpu_ms_per_request: float
    requests_per_cpu_s: float
    """What one core would pass if the router had it alone."""
    ttft_p50_ms: float
    ttft_p99_ms: float


@dataclass(frozen=True)
class Events:
    """Many streams at once."""

    streams: int
    token_events: int
    router_cpu_us_per_event: float
    """CPU of requests of one token taken off."""
    events_per_s: float


@dataclass(frozen=True)
class Added:
    """The same request through the router and straight to the workers, alternately, one at a time."""

    rounds: int
    tokens: int
    ttft_router_ms: float
    ttft_straight_ms: float
    ttft_ratio: float
    ttft_added_ms: float
    """Median over rounds of the difference."""
    gap_router_ms: float
    gap_straight_ms: float
    gap_ratio: float


@dataclass(frozen=True)
class Workers:
    """One prefill and one decode worker."""

    prefill: common_pb2.PeerId
    prefill_endpoint: str
    decode: common_pb2.PeerId
    decode_endpoint: str


def known_workers(cluster: LocalCluster, prefill: str, decode: str) -> Workers:
    """As the router knows them, by their names."""
    members = {one.peer.replica_id: one for one in cluster.status().members}
    source, target = members[prefill], members[decode]
    return Workers(source.peer, source.endpoint, target.peer, target.endpoint)


@contextmanager
def mocked_cluster(
    scratch: Path,
    prefill: int,
    decode: int,
    step_ms: float = 0.0,
    prefill_ms: float = 0.0,
    *,
    commit_here: bool = False,
) -> Iterator[LocalCluster]:
    """A real router over a process of mock workers; `commit_here`: which hand over without gRPC."""
    folder = scratch / "mock-model"
    folder.mkdir(exist_ok=True)
    config = {"model_type": "deepseek_v3", "vocab_size": 32_000, "max_position_embeddings": 1 << 18}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = ClusterSpec(folder, {}, sets=("admission.max_running=4096", "admission.max_waiting=4096"))
    with LocalCluster(spec) as cluster:
        command = [sys.executable, "-m", "bench.router_speed_harness.mock_workers", "--registry", cluster.router]
        command += ["--model", folder.name, "--prefill", str(prefill), "--decode", str(decode)]
        command += ["--step-ms", str(step_ms), "--prefill-ms", str(prefill_ms)]
        command += ["--commit-here"] * commit_here
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the mock workers did not start (exit status {process.wait()})")
            _until_known(cluster, prefill + decode)
            yield cluster
        finally:
            process.kill()
            process.wait()


def _until_known(cluster: LocalCluster, workers: int) -> None:
    deadline = monotonic() + 30.0
    while len(cluster.status().members) < workers:
        if monotonic() > deadline:
            raise RuntimeError("the router does not know the mock workers")
        sleep(0.05)


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing."""
    chance = random.Random(seed)
    return [[chance.randrange(FIRST_ID, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def router_pid(cluster: LocalCluster) -> dict[str, int]:
    return {"router": cluster.children[0].pid}


def passed(cluster: LocalCluster, clients: int, requests: int, prompt_tokens: int, told: Advance) -> Passed:
    """Requests of one token."""
    seen, seconds, cpu = _loop(cluster, clients, prompts(requests, prompt_tokens, 1), 1, told)
    first = sorted(one.ttft_s for one in seen)
    return Passed(
        clients=clients,
        requests=requests,
        requests_per_s=round(requests / seconds, 1),
        router_cpu_ms_per_request=round(1e3 * cpu / requests, 3),
        requests_per_cpu_s=round(requests / max(cpu, 1e-9), 1),
        ttft_p50_ms=round(1e3 * statistics.median(first), 2),
        ttft_p99_ms=round(1e3 * first[int(0.99 * (len(first) - 1))], 2),
    )


def events(
    cluster: LocalCluster, streams: int, tokens: int, prompt_tokens: int, request_cpu_ms: float, told: Advance
) -> Events:
    """`streams` requests at once, twice as many in all. `request_cpu_ms`: of a request of one token."""
    requests = 2 * streams
    seen, seconds, cpu = _loop(cluster, streams, prompts(requests, prompt_tokens, 2), tokens, told)
    count = sum(len(one.arrivals) for one in seen)
    return Events(
        streams=streams,
        token_events=count,
        router_cpu_us_per_event=round(1e6 * (cpu - requests * request_cpu_ms / 1e3) / (count - requests), 1),
        events_per_s=round(count / seconds),
    )


def _loop(
    cluster: LocalCluster, clients: int, texts: Sequence[Sequence[int]], tokens: int, told: Advance
) -> tuple[list[Seen], float, float]:
    """What clients saw, seconds, and the router's CPU seconds."""

    async def run() -> tuple[list[Seen], float, float]:
        async with channel(cluster.router) as opened:
            door = FrontDoor(opened)
            await closed_loop(door, prompts(2 * clients, 16, 3), clients, 2)
            before, start = CpuTimes.now(router_pid(cluster)), perf_counter()
            seen = await closed_loop(door, texts, clients, tokens, told)
            seconds = perf_counter() - start
            cpu = CpuTimes.now(router_pid(cluster)).since(before, 1.0)["router"]["all"]
            return seen, seconds, cpu

    return asyncio.run(run())


def added(
    cluster: LocalCluster,
    workers: Workers,
    rounds: int,
    prompt_tokens: int,
    tokens: int,
    told: Advance,
    keep_tokens: int = 0,
) -> Added:
    """Alternate, so that whatever else the machine does falls on both ways. `keep_tokens`: of models with a window."""
    return asyncio.run(_added(cluster, workers, rounds, prompt_tokens, tokens, told, keep_tokens))


async def _added(
    cluster: LocalCluster,
    workers: Workers,
    rounds: int,
    prompt_tokens: int,
    tokens: int,
    told: Advance,
    keep_tokens: int,
) -> Added:
    texts = prompts(2 * rounds + 4, prompt_tokens, os.getpid())
    ours: list[Seen] = []
    theirs: list[Seen] = []
    async with (
        channel(cluster.router) as router,
        channel(workers.prefill_endpoint) as to_prefill,
        channel(workers.decode_endpoint) as to_decode,
    ):
        model = await _model(router)
        door, straight = FrontDoor(router), StraightToWorkers(to_prefill, to_decode, model, keep_tokens)
        async with straight.attached():
            for number in range(rounds + 2):
                through = await door.send(texts[2 * number], tokens)
                direct = await straight.send(
                    texts[2 * number + 1], tokens, workers.prefill, workers.decode, workers.decode_endpoint
                )
                if number >= 2:  # the first ones open connections
                    ours.append(through)
                    theirs.append(direct)
                    told()
    first = [statistics.median(one.ttft_s for one in seen) for seen in (ours, theirs)]
    gap = [statistics.median(one.gap_s for one in seen) for seen in (ours, theirs)]
    difference = statistics.median(a.ttft_s - b.ttft_s for a, b in zip(ours, theirs, strict=True))
    return Added(
        rounds=rounds,
        tokens=tokens,
        ttft_router_ms=round(1e3 * first[0], 2),
        ttft_straight_ms=round(1e3 * first[1], 2),
        ttft_ratio=round(first[0] / first[1], 3),
        ttft_added_ms=round(1e3 * difference, 2),
        gap_router_ms=round(1e3 * gap[0], 3),
        gap_straight_ms=round(1e3 * gap[1], 3),
        gap_ratio=round(gap[0] / gap[1], 3),
    )


async def _model(router: grpc.aio.Channel) -> inference_pb2.Model:
    answer = await inference_pb2_grpc.InferenceServiceStub(router).ListModels(inference_pb2.ListModelsRequest())
    (model,) = answer.models
    return model
