"""Clients that leave at any moment leave nothing behind: a real cluster, real processes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from headrace.cli.ask import gather
from headrace.cli.child import Child
from headrace.cli.client import replica_status
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.v1 import common_pb2, control_pb2, inference_pb2, inference_pb2_grpc

STORM = 120
SETTLE_S = 120.0


@pytest.fixture(scope="module")
def cluster(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    spec = ClusterSpec(v3_folder, {"prefill": 1, "decode": 1}, sets=("load.dtype=float32",))
    with LocalCluster(spec, run_dir=tmp_path_factory.mktemp("run")) as running:
        yield running


def request(length: int, timeout_ms: int | None = None) -> inference_pb2.GenerateRequest:
    prompt = inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=[3 + i % 50 for i in range(length)]))
    stop = common_pb2.StopParams(max_tokens=24, ignore_eos=True)
    return inference_pb2.GenerateRequest(prompt=prompt, stop=stop, timeout_ms=timeout_ms)


def problems(cluster: LocalCluster) -> list[str]:
    """What of a worker or the router is not idle and sound (L11)."""
    found = []
    for child in cluster.children:
        assert child.address is not None
        status = replica_status(child.address, check_integrity=True)
        found += [f"{child.name}: {text}" for text in status.integrity.problems]
        found += [] if status.ready else [f"{child.name}: {status.unready_reason}"]
        found += [f"{child.name}: {status.requests.live} live"] if status.requests.live else []
        found += [f"{child.name}: {pool.name} {pool}" for pool in status.pools if _held(pool)]
    return found


def accepted(child: Child) -> int:
    assert child.address is not None
    return replica_status(child.address).requests.accepted


def _read_out(call: grpc.Call) -> None:
    """To its end: a deadline is a status or a terminal event, and then the usage adds up (L27, L28)."""
    finished = 0
    try:
        for response in call:
            finished += response.HasField("finished")
            if response.HasField("usage"):
                usage = response.usage
                assert usage.cached_tokens + usage.loaded_tokens + usage.computed_tokens == usage.prompt_tokens
    except grpc.RpcError:
        pass
    typed = (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert call.code() in typed
    assert finished == (call.code() is grpc.StatusCode.OK)


def _held(pool: control_pb2.PoolStatus) -> bool:
    return bool(pool.quarantined or pool.used or pool.pinned)


@pytest.mark.parametrize("seed", [5, 6])
def test_a_storm_of_leaving_clients_leaves_no_row_behind(cluster: LocalCluster, seed: int) -> None:
    """L7, L10, L11: every grant gets its last word, however early its client leaves."""
    dice = random.Random(seed)
    with grpc.insecure_channel(cluster.router) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = []
        for index in range(STORM):
            late = dice.randrange(1, 80) if index % 3 == 0 else None
            calls.append(stub.Generate(request(dice.randrange(20, 200), late), timeout=60))
            if index % 4 == 0:
                time.sleep(dice.random() * 0.02)
            if dice.random() < 0.6:
                calls.pop(dice.randrange(len(calls))).cancel()
        for index, call in enumerate(calls):
            if index % 2:
                call.cancel()
            else:
                _read_out(call)
    deadline = time.monotonic() + SETTLE_S
    while (left := problems(cluster)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    answer = gather(cluster.client.generate(request(150), timeout_s=60))
    assert len(answer.choices[0].token_ids) == 24


@pytest.fixture(scope="module")
def pair(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    spec = ClusterSpec(v3_folder, {"prefill": 2, "decode": 1}, sets=("load.dtype=float32",))
    with LocalCluster(spec, run_dir=tmp_path_factory.mktemp("pair")) as running:
        yield running


def test_a_prefill_that_was_frozen_owes_nobody_a_word_when_it_wakes(pair: LocalCluster) -> None:
    """L6, L7: it leaves the registry while calls are on their way to it; requests go elsewhere, and what was granted
    for those calls is given back once it says that it does not run them."""
    prefills = [child for child in pair.children if child.name.startswith("prefill")]
    before = {child.name: accepted(child) for child in prefills}
    with grpc.insecure_channel(pair.router) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [stub.Generate(request(150 + index), timeout=60) for index in range(12)]
        # A burst of like prompts may all be meant for one of them; that one is frozen.
        while not (taking := [child for child in prefills if accepted(child) > before[child.name]]):
            time.sleep(0.001)
        frozen = taking[0]
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            for call in calls:
                _read_out(call)
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
    deadline = time.monotonic() + SETTLE_S
    while (left := problems(pair)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
