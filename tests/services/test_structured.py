"""Constrained output through real processes: refused with the reason, or the same tokens by every way."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import grpc
import pytest
from jsonschema import Draft202012Validator

from bench.two_routers_harness.processes import EtcdCluster
from headrace.cli.client import replica_status
from headrace.cli.local_gateway import LocalGateway
from headrace.v1 import common_pb2, inference_pb2
from tests.services.cluster import PATIENCE_S
from tests.services.failover import Seen, alive, member, named, prompt_tokens, running, stream, until_idle
from tests.services.gateway.fakes import TEMPLATE
from tests.services.http_answers import APIS, MODEL, answer, at_once

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (package etcd-server)")
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "codes": {"type": "array", "items": {"enum": ["alpha", "beta", "gamma"]}, "minItems": 14, "maxItems": 16},
        "ok": {"type": "boolean"},
    },
    "required": ["id", "codes", "ok"],
    "additionalProperties": False,
}
DECODE = ("engine.max_sequences=16",)
TRIES = 5
SCHEMA_CONSTRAINT = common_pb2.Constraint(json_schema=json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def cluster(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    members = [member("router-0", "requests.recovery_seconds=120"), member("prefill-0")]
    members += [member(name, *DECODE) for name in ("decode-0", "decode-1")]
    with EtcdCluster(v3_folder, tmp_path_factory.mktemp("structured"), members) as running_:
        yield running_


def request(
    seed: int, constraint: common_pb2.Constraint | None, *, max_tokens: int = 300, n: int = 1
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


@pytest.fixture
def gateway(cluster: EtcdCluster, v3_folder: Path, tmp_path: Path) -> Iterator[str]:
    """URL of one in front of the cluster, with a chat template of our own."""
    folder = shutil.copytree(v3_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    entry = {
        "name": MODEL,
        "router": cluster.address("router-0"),
        "router_model": "default",
        "folder": str(folder),
        "protocol": "template",
    }
    with LocalGateway([entry]) as made:
        yield made.url


def others(count: int) -> list[inference_pb2.GenerateRequest]:
    """Requests to stand beside: free, held to an expression, held to the schema."""
    held: list[common_pb2.Constraint | None] = [None, common_pb2.Constraint(regex="[a-d]{40,60}"), SCHEMA_CONSTRAINT]
    return [request(8 + seed, held[seed % 3], max_tokens=60, n=1 + seed % 2) for seed in range(count)]


def test_the_same_tokens_by_every_way(cluster: EtcdCluster) -> None:
    """L5, L15: with a schema, alone, in a mixed batch of 16, and with decode killed in the middle of the stream."""
    router = cluster.address("router-0")
    wanted = request(7, SCHEMA_CONSTRAINT)
    alone = stream(router, named(wanted, "alone"))
    assert alone.finished[0].reason == common_pb2.FINISH_REASON_STOP
    Draft202012Validator(SCHEMA).validate(json.loads(alone.text[0]))

    with ThreadPoolExecutor(16) as pool:
        beside = [pool.submit(stream, router, named(one, f"mixed-{index}")) for index, one in enumerate(others(15))]
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


def test_the_same_answers_over_http(cluster: EtcdCluster, gateway: str) -> None:
    """L5, L15: what clients of Chat, Responses and Messages read, alone, among 15 others, and with decode killed in the
    middle of all their streams. One decode is left by now, so that they have to be together there."""
    (before,) = alive(cluster, "decode")
    alone = [answer(ask, gateway, SCHEMA) for ask in APIS]
    for text in alone:
        Draft202012Validator(SCHEMA).validate(json.loads(text))
    router = cluster.address("router-0")
    with ThreadPoolExecutor(16) as pool:
        beside = [pool.submit(stream, router, named(one, f"http-{index}")) for index, one in enumerate(others(13))]
        assert at_once(gateway, SCHEMA) == alone
        for each in beside:
            each.result()

    def move() -> None:
        """Unless one of them has ended while the others began."""
        if replica_status(cluster.address(before)).requests.live == len(APIS):
            cluster.children[before].signal(signal.SIGKILL)
            cluster.start(member("decode-2", *DECODE))

    for _ in range(TRIES):
        meeting = Barrier(len(APIS), action=move, timeout=PATIENCE_S)
        assert at_once(gateway, SCHEMA, meeting.wait) == alone
        if before not in alive(cluster, "decode"):
            break
    assert list(alive(cluster, "decode")) == ["decode-2"]
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
