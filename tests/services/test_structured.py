"""Constrained output through real processes: refused with the reason, or the same tokens by every way."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from jsonschema import Draft202012Validator

from bench.two_routers_harness.processes import EtcdCluster
from headrace.v1 import common_pb2, inference_pb2
from tests.services.failover import Seen, alive, member, named, prompt_tokens, running, stream, until_idle

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (package etcd-server)")
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "codes": {"type": "array", "items": {"enum": ["alpha", "beta", "gamma"]}, "minItems": 12, "maxItems": 14},
        "ok": {"type": "boolean"},
    },
    "required": ["id", "codes", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def cluster(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    names = ("router-0", "prefill-0", "decode-0", "decode-1")
    with EtcdCluster(v3_folder, tmp_path_factory.mktemp("structured"), [member(name) for name in names]) as running_:
        yield running_


def request(
    seed: int, constraint: common_pb2.Constraint | None, *, max_tokens: int = 250, n: int = 1
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt=prompt_tokens(20 + seed, seed),
        sampling=common_pb2.SamplingParams(temperature=0.9, top_p=0.95, seed=seed, logprobs=2, n=n),
        stop=common_pb2.StopParams(max_tokens=max_tokens),
        constraint=constraint,
    )


def test_what_cannot_be_enforced_is_refused(cluster: EtcdCluster) -> None:
    """L10, L13: at once, by whoever can tell, with the field and the reason; nothing is held for it."""
    router = cluster.address("router-0")
    refused = {
        "uniqueItems": common_pb2.Constraint(json_schema='{"type":"array","uniqueItems":true}'),
        "Lookahead": common_pb2.Constraint(regex="(?=a)a"),
        '"foo" is not defined': common_pb2.Constraint(grammar="root ::= foo"),
        "is not JSON": common_pb2.Constraint(structural_tag="{"),
        "1 to 1024": common_pb2.Constraint(choices=common_pb2.ConstraintChoices()),
        "names no language": common_pb2.Constraint(),
    }
    for told, constraint in refused.items():
        with pytest.raises(grpc.RpcError) as caught:
            stream(router, request(1, constraint))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        assert "constraint" in str(caught.value)
        assert told in str(caught.value)
    until_idle(cluster)


def test_the_same_tokens_by_every_way(cluster: EtcdCluster) -> None:
    """L5, L15: with a schema, alone, in a mixed batch of 16, and with decode killed in the middle of the stream."""
    router = cluster.address("router-0")
    wanted = request(7, common_pb2.Constraint(json_schema=json.dumps(SCHEMA)))
    alone = stream(router, named(wanted, "alone"))
    assert alone.finished[0].reason == common_pb2.FINISH_REASON_STOP
    Draft202012Validator(SCHEMA).validate(json.loads(alone.text[0]))

    others: list[common_pb2.Constraint | None] = [None, common_pb2.Constraint(regex="[a-d]{40,60}"), wanted.constraint]
    mixed = [request(8 + seed, others[seed % 3], max_tokens=60, n=1 + seed % 2) for seed in range(15)]
    with ThreadPoolExecutor(16) as pool:
        beside = [pool.submit(stream, router, named(one, f"mixed-{index}")) for index, one in enumerate(mixed)]
        together = pool.submit(stream, router, named(wanted, "together")).result()
        for one in beside:
            one.result()
    assert together.equals(alone)

    def kill() -> None:
        cluster.children[running(cluster, "decode")].signal(signal.SIGKILL)

    seen: Seen = stream(router, named(wanted, "moved"), act=kill)
    assert len(list(alive(cluster, "decode"))) == 1
    assert seen.equals(alone)
    until_idle(cluster)


def test_reasoning_comes_before(cluster: EtcdCluster) -> None:
    """Up to the mark everything is free but an end; a chat that asks for no reasoning is held at once."""
    router = cluster.address("router-0")
    asked = request(3, None, max_tokens=60)
    asked.sampling.temperature = 0  # drawn tokens may differ, as an end has no probability before the mark
    free = stream(router, asked).tokens[0]
    asked.constraint.CopyFrom(common_pb2.Constraint(regex="[xyz]{5}", after_token_ids=free[4:6]))
    seen = stream(router, asked)
    tokens = seen.tokens[0]
    assert tokens[:6] == free[:6]
    assert seen.finished[0].reason == common_pb2.FINISH_REASON_STOP
    assert len(tokens) == 6 + 5 + 1
