"""Conditional disaggregation through the router: a chat's next turn is computed where the last one ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.ask import Answer, gather, token_prompt
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.v1 import common_pb2, inference_pb2
from tests.services.cluster import EXACT
from tests.services.conftest import Offline
from tests.services.driver import make_request, prompt_of

MOST = 48


@pytest.fixture(scope="module")
def cluster(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    sets = (*EXACT, f"balance.compute_at_decode_tokens={MOST}", "engine.max_batched_tokens=128")
    spec = ClusterSpec(v3_folder, {"prefill": 1, "decode": 1}, sets=sets)
    with LocalCluster(spec, run_dir=tmp_path_factory.mktemp("conditional")) as running:
        yield running


def ask(cluster: LocalCluster, ids: tuple[int, ...]) -> tuple[Answer, list[int]]:
    """The answer, and the roles that took part."""
    request = inference_pb2.GenerateRequest(
        prompt=token_prompt(ids),
        sampling=common_pb2.SamplingParams(temperature=0.0, seed=11),
        stop=common_pb2.StopParams(max_tokens=12, ignore_eos=True),
        report=True,
    )
    answer = gather(cluster.client.generate(request, timeout_s=60))
    assert answer.report is not None
    return answer, [replica.role for replica in answer.report.replicas]


def test_the_next_turn_stays_at_decode(cluster: LocalCluster, v3_offline: Offline) -> None:
    """L5, L27: a long prompt takes the way over prefill, its next turn does not, and both have the tokens of one
    process. The index learns of decode's blocks by events, a moment later."""
    first = prompt_of("a chat that goes on", 150)
    before, roles = ask(cluster, first)
    assert roles == [common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE]
    said = before.choices[0].token_ids
    assert said == v3_offline.tokens(make_request("c1", first))[0]
    deadline = time.monotonic() + 120.0
    turn = 0
    while roles != [common_pb2.ROLE_DECODE]:
        assert time.monotonic() < deadline, "the next turn never stayed at decode"
        turn += 1
        second = (*first, *said, *prompt_of(f"and then {turn}", 10))
        answer, roles = ask(cluster, second)
        assert answer.choices[0].token_ids == v3_offline.tokens(make_request(f"c2-{turn}", second))[0]
    usage = answer.usage
    assert usage is not None
    assert usage.cached_tokens >= 144
    assert usage.computed_tokens <= MOST
    assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens == len(second)


def test_a_tiny_prompt_needs_no_prefill_and_a_larger_one_does(cluster: LocalCluster, v3_offline: Offline) -> None:
    tiny, larger = prompt_of("tiny", 20), prompt_of("larger", MOST + 20)
    answer, roles = ask(cluster, tiny)
    assert roles == [common_pb2.ROLE_DECODE]
    assert answer.choices[0].token_ids == v3_offline.tokens(make_request("tiny", tiny))[0]
    answer, roles = ask(cluster, larger)
    assert roles == [common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE]
    assert answer.choices[0].token_ids == v3_offline.tokens(make_request("larger", larger))[0]
