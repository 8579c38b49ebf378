"""Streams that are disturbed on the way, for tests of what their client sees."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.two_routers_harness.processes import EtcdCluster, Member
from headrace.cli.client import replica_status
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.services.cluster import EXACT, PATIENCE_S, POOL

ENGINE = (*EXACT, *POOL)
ROUTER = (
    "registry.ttl_seconds=2",
    "router.renew_seconds=0.5",
    "router.silence_seconds=4",
    "router.salt_secret=0123456789abcdef",
)


def member(name: str, *sets: str) -> Member:
    """A process of the role that its name begins with."""
    role = name.partition("-")[0]
    own = {"router": ROUTER, "prefill": ENGINE, "decode": ENGINE, "encoder": EXACT}[role]
    return Member(name, role, ("registry.ttl_seconds=2", *own, *sets))


@dataclass
class Seen:
    """What one or several streams of a request brought, as one client sees it."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    finished: dict[int, common_pb2.FinishedEvent] = field(default_factory=dict)
    usage: common_pb2.Usage | None = None
    report: inference_pb2.RequestReport | None = None

    def take(self, event: inference_pb2.GenerateResponse) -> None:
        """L15, L28: no token twice, none left out, nothing after an end, one usage record."""
        assert self.usage is None or event.HasField("report"), "an event after the usage record"
        if event.HasField("tokens"):
            tokens = event.tokens
            assert tokens.choice not in self.finished, "tokens after the terminal event"
            known = self.tokens.setdefault(tokens.choice, [])
            assert tokens.offset == len(known), f"offset {tokens.offset} after {len(known)} tokens"
            known.extend(tokens.token_ids)
            self.text[tokens.choice] = self.text.get(tokens.choice, "") + tokens.text
            self.logprobs.setdefault(tokens.choice, []).extend(
                (each.chosen.token_id, each.chosen.logprob) for each in tokens.logprobs
            )
        elif event.HasField("finished"):
            assert event.finished.choice not in self.finished, "a second terminal event"
            self.finished[event.finished.choice] = event.finished
        elif event.HasField("usage"):
            self.usage = event.usage
        elif event.HasField("report"):
            self.report = event.report

    @property
    def count(self) -> int:
        """Tokens of all choices."""
        return sum(len(tokens) for tokens in self.tokens.values())

    def equals(self, other: Seen) -> bool:
        """Tokens, text, log-probabilities and ends."""
        return (self.tokens, self.text, self.logprobs, _ends(self)) == (
            other.tokens,
            other.text,
            other.logprobs,
            _ends(other),
        )


def _ends(seen: Seen) -> dict[int, tuple[int, int, str]]:
    return {
        choice: (event.reason, event.completion_tokens, event.stop_string) for choice, event in seen.finished.items()
    }


def prompt_tokens(length: int, seed: int) -> inference_pb2.Prompt:
    """Plain token ids; prompts of different seeds share no prefix."""
    ids = [3 + (seed * 31 + index * index * 17 + index * 5) % 240 for index in range(length)]
    return inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=ids))


def stream(
    address: str,
    request: inference_pb2.GenerateRequest,
    seen: Seen | None = None,
    *,
    at: int = 10,
    act: Callable[[], Any] | None = None,
) -> Seen:
    """Read a request's stream to its end; once `at` tokens have come, `act`. Raises grpc.RpcError."""
    seen = Seen() if seen is None else seen
    with grpc.insecure_channel(address) as channel:
        for event in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=PATIENCE_S):
            seen.take(event)
            if act is not None and seen.count >= at:
                act()
                act = None
    assert act is None, "the stream ended before it was disturbed"
    return seen


def named(request: inference_pb2.GenerateRequest, name: str) -> inference_pb2.GenerateRequest:
    """The same request under another name: with its seed, the same tokens."""
    copy = inference_pb2.GenerateRequest()
    copy.CopyFrom(request)
    copy.request_id, copy.report = name, True
    return copy


def running(cluster: EtcdCluster, role: str) -> str:
    """Name of the process of a role that has a live request."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for name in alive(cluster, role):
            if replica_status(cluster.address(name)).requests.live:
                return name
        time.sleep(0.01)
    raise AssertionError(f"no {role} has a live request")


def alive(cluster: EtcdCluster, role: str) -> Iterator[str]:
    """Names of the processes of a role that run."""
    return (name for name in cluster.names(role) if cluster.children[name].status is None)


def until_idle(cluster: EtcdCluster) -> None:
    """L11: every process that runs has given everything back and is sound."""
    problems: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        problems = [text for name in _running(cluster) for text in _busy(cluster, name)]
        if not problems:
            return
        time.sleep(0.1)
    raise AssertionError(problems)


def _running(cluster: EtcdCluster) -> list[str]:
    return [name for name, child in cluster.children.items() if child.status is None]


def _busy(cluster: EtcdCluster, name: str) -> list[str]:
    status = replica_status(cluster.address(name), check_integrity=True)
    found = [f"{name}: {text}" for text in status.integrity.problems]
    found += [f"{name}: {status.requests.live} live"] if status.requests.live else []
    found += [f"{name}: {pool.name}" for pool in status.pools if pool.used or pool.pinned or pool.quarantined]
    return found
