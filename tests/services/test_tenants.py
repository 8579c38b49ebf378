"""Two tenants, an operator and one small cluster of real processes: what is shared, what is managed (L25, L24)."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import PIL.Image
import pytest

from headrace.cli import main as program
from headrace.cli.ask import Answer, Message, chat_prompt, gather, text_prompt
from headrace.cli.client import RouterClient, replica_status, typed
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.exits import Exit
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.model import make
from headrace.services.runtime.errors import InvalidArgument, NotFound, PermissionDenied, Unauthenticated
from headrace.v1 import common_pb2, control_pb2, events_pb2, events_pb2_grpc, inference_pb2
from tests.services.tiny import BLOCK

KEYS = {name: f"key-of-{name}" for name in ("acme", "umbrella", "alice")}
PROMPT = "A reservoir feeds the wheel through a headrace. " * 5


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "tenants.toml").write_text(
        f"""
        [tenants.acme]
        keys = ["{digest(KEYS["acme"])}"]
        [tenants.umbrella]
        keys = ["{digest(KEYS["umbrella"])}"]
        [operators.alice]
        keys = ["{digest(KEYS["alice"])}"]
        """
    )
    sets = (
        f"router.tenants={folder / 'tenants.toml'}",
        "router.fork_min_tokens=32",
        "load.dtype=float32",
        "load.entry_format=float32",
        f"load.block_tokens={BLOCK}",
        "load.native_kernels=false",
        "cache.min_load_tokens=1",
        "cache.break_even=false",
    )
    model = make("deepseek-v41-tiny", folder, 0)
    spec = ClusterSpec(model, {"encoder": 1, "prefill": 1, "decode": 1}, sets=sets, store=str(folder / "store"))
    with LocalCluster(spec, run_dir=folder / "run") as running:
        yield running


@contextmanager
def caller(cluster: LocalCluster, name: str) -> Iterator[RouterClient]:
    with RouterClient(cluster.router, api_key=KEYS[name]) as client:
        yield client


def ask(cluster: LocalCluster, name: str, prompt: inference_pb2.Prompt, **fields: Any) -> Answer:
    request = inference_pb2.GenerateRequest(
        prompt=prompt, stop=common_pb2.StopParams(max_tokens=3, ignore_eos=True), **fields
    )
    with caller(cluster, name) as client:
        return gather(client.generate(request, timeout_s=60))


def held(cluster: LocalCluster, replica: str) -> set[bytes]:
    """Block keys of a worker's device pool, as its event service lists them."""
    address = cluster.child(replica).address
    assert address is not None
    with grpc.insecure_channel(address) as channel:
        pages = events_pb2_grpc.EventServiceStub(channel).Snapshot(events_pb2.SnapshotRequest(), timeout=30)
        return {key for page in pages for entry in page.entries if entry.kind == 1 for key in entry.keys}


def embeddings(cluster: LocalCluster) -> int:
    """Rows that the encoder keeps."""
    address = cluster.child("encoder-0").address
    assert address is not None
    pools = {pool.name: pool for pool in replica_status(address).pools}
    return pools["embeddings"].total - pools["embeddings"].free


def picture(shade: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (90, 60), (shade, 20, 200)).save(file, format="PNG")
    return file.getvalue()


def cached(answer: Answer) -> int:
    assert answer.usage is not None
    return answer.usage.cached_tokens


def gone(client: RouterClient) -> None:
    """Ask for a drain."""
    try:
        client.drain(0.0).result()
    except grpc.RpcError as error:
        raise typed(error) from error


def test_no_key_no_service(cluster: LocalCluster) -> None:
    request = inference_pb2.GenerateRequest(prompt=text_prompt("hello"))
    for key in (None, "another"):
        with RouterClient(cluster.router, api_key=key) as client:
            with pytest.raises(Unauthenticated, match="Bearer"):
                gather(client.generate(request, timeout_s=30))
            with pytest.raises(Unauthenticated):
                client.models()
            with pytest.raises(Unauthenticated):
                client.cache_stats()
            with pytest.raises(Unauthenticated):
                client.status()
            with pytest.raises(Unauthenticated):
                gone(client)
    with caller(cluster, "acme") as client:
        assert client.models().models
        for operate in (client.cache_stats, client.status, lambda: gone(client)):
            with pytest.raises(PermissionDenied, match="operator"):
                operate()
    with caller(cluster, "alice") as client:
        assert client.status().ready, "nobody has drained it"


def test_equal_prompts_of_two_tenants_share_no_block(cluster: LocalCluster) -> None:
    """L25: the second tenant's first time computes everything, and its blocks have keys of its own."""
    prompt = text_prompt(PROMPT)
    first = ask(cluster, "acme", prompt)
    assert cached(first) == 0
    for replica in ("prefill-0", "decode-0"):
        assert held(cluster, replica)
    before = held(cluster, "prefill-0")
    other = ask(cluster, "umbrella", prompt, sampling=common_pb2.SamplingParams(seed=1))
    assert cached(other) == 0
    new = held(cluster, "prefill-0") - before
    assert len(new) == len(PROMPT) // BLOCK, "every full block again, under other keys"
    assert cached(ask(cluster, "acme", prompt)) > 0
    assert cached(ask(cluster, "umbrella", prompt)) > 0


def test_equal_prompts_in_flight_share_nothing_either(cluster: LocalCluster) -> None:
    prompt = text_prompt("In flight. " + PROMPT)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda name: ask(cluster, name, prompt), ("acme", "umbrella")))
    assert [cached(answer) for answer in answers] == [0, 0]


def test_one_picture_is_encoded_once_per_tenant(cluster: LocalCluster) -> None:
    """L25: embeddings are named by HMAC(tenant's image key, content digest), in flight too."""
    prompt = chat_prompt([Message("user", "What is this?", (picture(90),))])
    before = embeddings(cluster)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda name: ask(cluster, name, prompt), ("acme", "umbrella", "acme", "umbrella")))
    assert answers[0].usage is not None
    tokens = answers[0].usage.image_tokens
    assert tokens
    assert embeddings(cluster) == before + 2 * tokens
    ask(cluster, "acme", prompt)
    assert embeddings(cluster) == before + 2 * tokens


def test_a_shared_system_message_is_reused_from_the_second_chat_on(cluster: LocalCluster) -> None:
    """spec/kv_tier.md: a snapshot stands at the block boundary before the end of the system message."""
    system = Message("system", "You answer questions about water wheels, briefly and in plain words, for beginners.")
    chats = [chat_prompt([system, Message("user", f"{word} " * 30)]) for word in ("sluice", "flume")]
    assert cached(ask(cluster, "acme", chats[0])) == 0
    reused = cached(ask(cluster, "acme", chats[1]))
    assert reused >= len(system.text) // BLOCK * BLOCK
    assert reused % BLOCK == 0


def test_where_prompts_part_the_third_one_enters(cluster: LocalCluster) -> None:
    """spec/kv_tier.md: a snapshot at forks the router has seen; the second prompt makes it, the third uses it."""
    document = "The tailrace carries the water away from the wheel, back to the river below the mill, day and night."
    prompts = [text_prompt(document + f" {word} " * 20) for word in ("one", "two", "six")]
    assert [cached(ask(cluster, "umbrella", prompt)) for prompt in prompts[:2]] == [0, 0]
    assert cached(ask(cluster, "umbrella", prompts[2])) >= len(document) // BLOCK * BLOCK


def run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
    with pytest.raises(SystemExit) as end:
        program.main()
    out, err = capsys.readouterr()
    return (end.value.code if isinstance(end.value.code, int) else 0), out, err


def test_an_operator_finds_and_erases(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`headrace cache`: stats, find and drop-tenant through the router, for an operator's key only."""
    text = "What an operator looks for. " * 6
    ask(cluster, "acme", text_prompt(text))
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    monkeypatch.setenv("HEADRACE_API_KEY", KEYS["alice"])
    at = ["--router", cluster.router, "--json"]

    code, out, _ = run(["status", *at], monkeypatch, capsys)
    assert code == Exit.DONE
    assert json.loads(out)["healthy"]
    code, out, _ = run(["cache", "stats", *at], monkeypatch, capsys)
    tiers = json.loads(out)["tiers"]
    assert code == Exit.DONE
    devices = [tier for tier in tiers if tier["tier"] == "CACHE_TIER_DEVICE"]
    assert {tier["replica"]["replica_id"] for tier in devices} == {"prefill-0", "decode-0"}
    (store,) = (tier for tier in tiers if tier["tier"] == "CACHE_TIER_STORE")
    assert store["replica"] is None
    assert {peer["replica_id"] for peer in store["sharing"]} == {"prefill-0", "decode-0"}
    assert all(tier["blocks"] > 0 for tier in devices)

    def found(tenant: str) -> dict[str, Any]:
        code, out, err = run(["cache", "find", str(file), "--tenant", tenant, *at], monkeypatch, capsys)
        assert code == Exit.DONE, err
        answer: dict[str, Any] = json.loads(out)
        return answer

    full = len(text) // BLOCK
    deadline = time.monotonic() + 60
    while found("acme")["usable_tokens"]["store"] < full * BLOCK - 2 * BLOCK and time.monotonic() < deadline:
        time.sleep(0.1)
    mine = found("acme")
    assert mine["usable_tokens"]["store"] > 0
    assert {place["retention"] for block in mine["blocks"] for place in block["places"]} == {"", "chat"}
    assert mine["prompt_tokens"] == len(text)
    assert [block["end_tokens"] for block in mine["blocks"]] == [BLOCK * (index + 1) for index in range(full)]
    for block in mine["blocks"]:
        assert "prefill-0" in {place["replica"]["replica_id"] for place in block["places"] if place["replica"]}
    assert mine["usable_tokens"]["device"] == full * BLOCK
    assert found("umbrella")["usable_tokens"]["any"] == 0
    code, _, err = run(["cache", "find", str(file), "--tenant", "nobody", *at], monkeypatch, capsys)
    assert code == Exit.USAGE
    assert "no tenant 'nobody'" in err

    code, out, _ = run(["cache", "drop-tenant", "acme", "--yes", *at], monkeypatch, capsys)
    assert code == Exit.DONE
    assert json.loads(out)["blocks"] >= full
    assert found("acme")["usable_tokens"]["any"] == 0
    again = ask(cluster, "acme", text_prompt(text))
    assert again.usage is not None
    assert (again.usage.cached_tokens, again.usage.loaded_tokens) == (0, 0), "erased in every tier"

    code, out, _ = run(["cache", "verify", *at], monkeypatch, capsys)
    assert code == Exit.DONE
    assert json.loads(out)["done"]
    code, out, _ = run(["cache", "gc", *at], monkeypatch, capsys)
    assert code in (Exit.DONE, Exit.UNHEALTHY), "the sweeper of another worker may be at it"
    pin = ["cache", "pin", str(file), "--tenant", "acme", *at]
    code, out, err = run(pin, monkeypatch, capsys)
    while code == Exit.UNHEALTHY and time.monotonic() < deadline:  # what was asked again is on its way to the store
        assert "nothing is kept" in err
        time.sleep(0.1)
        code, out, err = run(pin, monkeypatch, capsys)
    assert code == Exit.DONE
    pinned = json.loads(out)
    assert pinned["asked"] == 2 * full
    assert 0 < pinned["usable_tokens"] <= pinned["prompt_tokens"] == len(text)
    code, _, err = run(["cache", "drop-tenant", "acme-typo", "--yes", *at], monkeypatch, capsys)
    assert code == Exit.USAGE
    assert "no tenant 'acme-typo'" in err

    for command in (["stats"], ["find", str(file), "--tenant", "acme"]):
        code, out, _ = run(["cache", *command, "--router", cluster.router], monkeypatch, capsys)
        assert code == Exit.DONE
        assert "device" in out
    monkeypatch.setenv("HEADRACE_API_KEY", KEYS["acme"])
    code, _, err = run(["cache", "drop-tenant", "umbrella", "--yes", *at], monkeypatch, capsys)
    assert code == Exit.USAGE
    assert "operator" in err


def test_generate_takes_the_key_from_flag_or_environment(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask_for = ["generate", "hello", "--max-tokens", "1", "--ignore-eos", "--router", cluster.router]
    code, _, err = run(ask_for, monkeypatch, capsys)
    assert code == Exit.USAGE
    assert "Bearer" in err
    assert run([*ask_for, "--api-key", KEYS["acme"]], monkeypatch, capsys)[0] == Exit.DONE
    monkeypatch.setenv("HEADRACE_API_KEY", KEYS["umbrella"])
    assert run(ask_for, monkeypatch, capsys)[0] == Exit.DONE


def test_what_cannot_be_named_is_refused(cluster: LocalCluster) -> None:
    with caller(cluster, "alice") as client:
        with pytest.raises(NotFound):
            client.find_cache(control_pb2.FindCacheRequest(prompt=text_prompt("x" * 40), tenant="default"))
        with pytest.raises(InvalidArgument, match="tenant"):
            client.clear_cache(control_pb2.ClearCacheRequest(tenant=""))
        assert client.clear_cache(control_pb2.ClearCacheRequest(namespace=b"\x07" * 32)).blocks == 0
    assert held(cluster, "prefill-0"), "another model's namespace leaves this model's device pools alone"
