"""Workers and routers that die or stand still in the middle of a stream: its client sees one stream, equal to the
undisturbed one (L5, L15, L28). Real processes around a real etcd."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bench.two_routers_harness.clients import OPTIONS
from bench.two_routers_harness.processes import EtcdCluster
from headrace.cli.client import replica_status
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.services.failover import (
    PATIENCE_S,
    Seen,
    alive,
    member,
    named,
    prompt_tokens,
    running,
    stream,
    until_idle,
)
from tests.services.test_images import IMAGE_TOKEN, picture

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (package etcd-server)")
LENGTH = 200
FEW = 24
"""Tokens of the slower model."""
AHEAD = 100
"""More tokens of each of three choices than `router.credit_tokens` lets be on the way."""
SLOWLY = ("engine.max_batched_tokens=16",)
"""Of prefills: a long prompt is under way until it is found there."""


@pytest.fixture(scope="module")
def cluster(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    names = ("router-0", "router-1", *(f"decode-{index}" for index in range(4)))
    members = [*map(member, names), *(member(f"prefill-{index}", *SLOWLY) for index in range(2))]
    with EtcdCluster(v3_folder, tmp_path_factory.mktemp("failover"), members) as running_:
        yield running_


def router(cluster: EtcdCluster) -> str:
    return cluster.address(next(alive(cluster, "router")))


def request(seed: int, **stop: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt=prompt_tokens(50, seed),
        sampling=common_pb2.SamplingParams(temperature=0.9, top_p=0.95, seed=seed, logprobs=2),
        stop=common_pb2.StopParams(max_tokens=LENGTH, ignore_eos=True, **stop),
    )


def kill(cluster: EtcdCluster, role: str) -> str:
    """`kill -9` of the process of a role that has the live request."""
    name = running(cluster, role)
    cluster.children[name].signal(signal.SIGKILL)
    return name


def test_a_decode_that_stands_still_is_left(cluster: EtcdCluster) -> None:
    """L15, L16: SIGSTOP in the middle of a stream, noticed by its silence; when it goes on, what it still says is not
    heard and it gives everything back."""
    wanted = request(5)
    expected = stream(router(cluster), named(wanted, "calm-5"))
    stopped: list[int] = []

    def stop() -> None:
        child = cluster.children[running(cluster, "decode")]
        stopped.append(child.pid)
        child.signal(signal.SIGSTOP)

    try:
        seen = stream(router(cluster), named(wanted, "frozen-5"), act=stop)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert seen.equals(expected)
    until_idle(cluster)


def test_a_router_that_stands_still_goes_on(cluster: EtcdCluster) -> None:
    """L8: SIGSTOP for longer than decode's lease; decode keeps the orphan, and the same attempt goes on."""
    wanted = request(9)
    expected = stream(router(cluster), named(wanted, "calm-9"))

    def freeze() -> None:
        child = cluster.children["router-0"]
        child.signal(signal.SIGSTOP)
        time.sleep(7.0)
        child.signal(signal.SIGCONT)

    seen = stream(cluster.address("router-0"), named(wanted, "frozen-9"), act=freeze)
    assert seen.equals(expected)
    assert seen.report is not None
    assert seen.report.attempts == 1
    until_idle(cluster)


def test_three_choices_survive_the_death_of_decode(cluster: EtcdCluster) -> None:
    """L15: n = 3 with penalties and log-probabilities; each choice goes on at its own next token. Usage tells what was
    computed again apart (L27), and there is one of it."""
    wanted = request(3, min_tokens=20)
    wanted.sampling.n, wanted.sampling.presence_penalty, wanted.sampling.repetition_penalty = 3, 0.4, 1.1
    expected = stream(router(cluster), named(wanted, "calm-3"))
    seen = stream(router(cluster), named(wanted, "killed-3"), at=30, act=lambda: kill(cluster, "decode"))
    assert seen.equals(expected)
    assert seen.report is not None
    assert seen.report.attempts == 2
    assert seen.usage is not None
    assert expected.usage is not None
    assert seen.usage.completion_tokens == 3 * LENGTH
    assert seen.usage.cached_tokens + seen.usage.computed_tokens == 50
    assert seen.usage.recomputed_tokens >= 30
    assert expected.usage.recomputed_tokens == 0
    until_idle(cluster)


def test_three_choices_that_a_failure_cut_up_are_resumed_at_another_router(cluster: EtcdCluster) -> None:
    """L15, L16: decode dies, each choice is continued by itself, then the router stands still and the client goes on at
    another one: every event once, and no choice had to be made anew."""
    wanted = request(13, min_tokens=20)
    wanted.sampling.n, wanted.sampling.presence_penalty = 3, 0.4
    first, second = cluster.names("router")
    expected = stream(cluster.address(second), named(wanted, "calm-13"))
    lost, seen, frozen = named(wanted, "cut-13"), Seen(), cluster.children[first]
    try:
        # Of a client that takes little at a time, the router has at most its credit at decode on the way.
        with grpc.insecure_channel(cluster.address(first), options=OPTIONS) as channel:
            before: dict[int, int] = {}
            for event in inference_pb2_grpc.InferenceServiceStub(channel).Generate(lost, timeout=PATIENCE_S):
                seen.take(event)
                if not before and len(seen.tokens) == 3 and seen.count >= 12:
                    kill(cluster, "decode")
                    before = {choice: len(tokens) for choice, tokens in seen.tokens.items()}
                if before and all(len(seen.tokens[choice]) >= before[choice] + AHEAD for choice in before):
                    frozen.signal(signal.SIGSTOP)
                    break
        seen.finished.clear()  # ends are told again
        lost.resume.extend(
            inference_pb2.ResumePoint(choice=choice, resume_offset=len(tokens))
            for choice, tokens in seen.tokens.items()
        )
        stream(cluster.address(second), lost, seen)
    finally:
        frozen.signal(signal.SIGCONT)
    assert seen.equals(expected)
    assert seen.report is not None
    assert {each.role for each in seen.report.replicas} == {common_pb2.ROLE_DECODE}, "all were adopted"
    until_idle(cluster)


def test_a_half_matched_stop_string_is_completed_elsewhere(cluster: EtcdCluster) -> None:
    """L15: what may begin a stop string is held back, and the continuation decides about it. Many tokens are held back
    for a while here, since stop strings begin with what comes all the time."""
    wanted = request(21)
    text = stream(router(cluster), named(wanted, "plain-21")).text[0]
    middle = next(at for at in range(len(text) // 2, len(text) - 3) if "\ufffd" not in text[at : at + 3])
    wanted.stop.stop.extend([text[middle : middle + 3], *(f"{text[at]}\x00" for at in range(0, middle, 40))])
    expected = stream(router(cluster), named(wanted, "calm-21"))
    assert expected.finished[0].reason == common_pb2.FINISH_REASON_STOP
    seen = stream(router(cluster), named(wanted, "killed-21"), act=lambda: kill(cluster, "decode"))
    assert seen.equals(expected)
    until_idle(cluster)


def test_a_prefill_that_dies_is_replaced(cluster: EtcdCluster) -> None:
    """L15: killed while it computes the prompt; the client notices nothing."""
    wanted = request(7)
    wanted.prompt.CopyFrom(prompt_tokens(1500, 7))
    wanted.stop.max_tokens = 20
    seen = Seen()
    with grpc.insecure_channel(router(cluster)) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(named(wanted, "killed-7"), timeout=PATIENCE_S)
        kill(cluster, "prefill")
        for event in call:
            seen.take(event)
    assert seen.report is not None
    assert seen.report.attempts == 2
    assert seen.equals(stream(router(cluster), named(wanted, "calm-7")))
    until_idle(cluster)


def test_a_client_resumes_at_another_router(cluster: EtcdCluster) -> None:
    """L15: its router dies; at another one it goes on with the next token, text and log-probabilities as before, and
    decode had not to begin anew."""
    wanted = request(11)
    wanted.sampling.n = 2
    first, second = cluster.names("router")
    expected = stream(cluster.address(second), named(wanted, "calm-11"))
    lost = named(wanted, "lost-11")
    seen = Seen()
    with pytest.raises(grpc.RpcError):
        stream(cluster.address(first), lost, seen, at=20, act=lambda: cluster.children[first].signal(signal.SIGKILL))
    assert not seen.finished
    begun = seen.count
    lost.resume.extend(
        inference_pb2.ResumePoint(choice=choice, resume_offset=len(tokens)) for choice, tokens in seen.tokens.items()
    )
    stream(cluster.address(second), lost, seen)
    assert seen.equals(expected)
    assert seen.report is not None
    assert [each.role for each in seen.report.replicas] == [common_pb2.ROLE_DECODE], "it was adopted, not made anew"
    assert begun < seen.count
    # Whether decode remembers it or it is made anew from its seed: events below the offset are left out.
    until_idle(cluster)
    again = Seen()
    for choice, tokens in expected.tokens.items():
        again.tokens[choice] = tokens[:33]
    del lost.resume[:]
    lost.resume.extend(inference_pb2.ResumePoint(choice=choice, resume_offset=33) for choice in (0, 1))
    stream(cluster.address(second), lost, again)
    assert again.tokens == expected.tokens
    until_idle(cluster)


@pytest.fixture(scope="module")
def pictures(v41_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """DeepSeek-V4.1 with an encoder to spare."""
    names = ("router-0", "prefill-0", "decode-0", "decode-1", "decode-2", "encoder-0", "encoder-1")
    with EtcdCluster(v41_folder, tmp_path_factory.mktemp("pictures"), [member(name) for name in names]) as running_:
        yield running_


def test_pictures_are_encoded_again_where_their_encoder_is_gone(pictures: EtcdCluster) -> None:
    """L15: encoder and decode die together in the middle of a stream; another encoder makes the embeddings again."""
    wanted = request(23)
    wanted.stop.max_tokens = FEW
    wanted.prompt.CopyFrom(
        inference_pb2.Prompt(
            tokens=inference_pb2.TokenPrompt(
                token_ids=[5, IMAGE_TOKEN, *range(10, 40)], images=[inference_pb2.Image(data=picture((200, 30, 30)))]
            )
        )
    )
    before = {name: accepted(pictures, name) for name in pictures.names("encoder")}

    def kill_both() -> None:
        (used,) = (name for name in before if accepted(pictures, name) > before[name])
        pictures.children[used].signal(signal.SIGKILL)
        kill(pictures, "decode")

    seen = stream(router(pictures), named(wanted, "killed-23"), at=5, act=kill_both)
    assert seen.report is not None
    assert len({each.peer.replica_id for each in seen.report.replicas if each.role == common_pb2.ROLE_ENCODER}) == 2
    assert seen.equals(stream(router(pictures), named(wanted, "calm-23")))
    until_idle(pictures)


def accepted(cluster: EtcdCluster, name: str) -> int:
    """Requests that a process has ever taken."""
    return replica_status(cluster.address(name)).requests.accepted
