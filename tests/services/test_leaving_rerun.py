"""Clients that leave, or whose time is over, while their requests are continued elsewhere: nothing is left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from headrace.cli.client import drain_replica
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.v1 import inference_pb2_grpc
from tests.services.test_leaving import SETTLE_S, problems, request

STREAMS = 12


@pytest.fixture(scope="module")
def cluster(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    spec = ClusterSpec(v3_folder, {"prefill": 1, "decode": 2}, sets=("load.dtype=float32", "load.native_kernels=false"))
    with LocalCluster(spec, run_dir=tmp_path_factory.mktemp("run")) as running:
        yield running


@pytest.mark.parametrize("seed", [1, 2])
def test_leaving_a_request_that_runs_again(cluster: LocalCluster, seed: int) -> None:
    """L7, L10, L11: decode hands its streams over, and around that their clients cancel; some have a deadline
    that falls there. Books balance, pools are empty, nothing is in quarantine."""
    dice = random.Random(seed)
    drained = cluster.child(f"decode-{seed % 2}").address
    assert drained is not None
    with grpc.insecure_channel(cluster.router) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        late = [dice.randrange(100, 900) if index % 3 == 0 else None for index in range(STREAMS)]
        calls = [stub.Generate(request(dice.randrange(20, 200), each), timeout=60) for each in late]
        time.sleep(dice.random() * 0.5)
        drain_replica(drained, wait_s=0.0, hand_over=True)
        for call in calls:
            time.sleep(dice.random() * 0.02)
            call.cancel()
    deadline = time.monotonic() + SETTLE_S
    drain_replica(drained, resume=True)
    while (left := problems(cluster)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
