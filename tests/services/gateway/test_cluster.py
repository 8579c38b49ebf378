"""The gateway before a real cluster of processes, as the official clients see it (V4.1-tiny, random weights).

Between them is mutual TLS, callers are tenants with keys, and their rates are counted in Redis.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anthropic
import openai
import PIL.Image
import pytest
import redis
from jsonschema import Draft202012Validator

from headrace.cli.certificates import files_of, issue, make_authority
from headrace.cli.client_tls import TLS_FOLDER
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.local_gateway import LocalGateway, served
from headrace.cli.model import make
from headrace.engine.text.tokenizer import Tokenizer
from headrace.services.gateway.settings import ModelEntry
from headrace.services.gateway.upstream import Upstream, load_assets
from headrace.services.router.api_keys import KeyRole, KeysDocument, TenantLimits, mint
from headrace.services.runtime.errors import DeadlineExceeded, Unavailable
from headrace.services.runtime.files import write_whole
from headrace.services.runtime.peers import Peer, PeerRole
from headrace.services.runtime.settings import RpcSettings
from headrace.services.runtime.tls import Tls
from tests.kvcache.index.redis_server import RedisServer
from tests.services.gateway.fakes import TEMPLATE

HI: Any = [{"role": "user", "content": "Hi"}]
PATIENCE_S = 120.0


@dataclass
class Served:
    cluster: LocalCluster
    url: str
    folder: Path
    keys: KeysDocument
    key: str
    """Of the tenant acme, which has no limits."""
    other: str
    """Of acme, too."""
    limited: str
    """Of the tenant umbrella, which has one request and hours to wait for the next, and 10 tokens a second."""

    redis: str
    """Of limits and responses."""

    def write_keys(self) -> None:
        write_whole(self.folder / "keys.json", self.keys.model_dump_json().encode(), 0o600)

    def until_idle(self) -> None:
        """L10, L11: what clients left is over at the router."""
        deadline = time.monotonic() + PATIENCE_S
        while self.cluster.status().requests.live and time.monotonic() < deadline:
            time.sleep(0.05)
        requests = self.cluster.status().requests
        assert requests.live == 0
        ended = requests.finished + requests.cancelled + requests.deadline + requests.failed
        assert requests.accepted == ended


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One cluster, served twice: in DeepSeek's encoding, and with a template of our own."""
    scratch = tmp_path_factory.mktemp("gateway")
    tiny = make("deepseek-v41-tiny", scratch, 0)
    plain = scratch / "plain"
    plain.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        shutil.copy(tiny / name, plain)
    (plain / "chat_template.jinja").write_text(TEMPLATE)
    shared = RedisServer(scratch / "redis")
    shared.start()
    (scratch / "gateway").mkdir()
    (key, first), (other, second) = mint(KeyRole.TENANT, "acme"), mint(KeyRole.TENANT, "acme")
    limited, third = mint(KeyRole.TENANT, "umbrella")
    limits = TenantLimits(requests_per_second=0.0001, tokens_per_second=10)
    keys = KeysDocument().with_key(first).with_key(second).with_key(third, limits)
    sets = (
        "load.native_kernels=false",
        f"router.keys={scratch / 'keys.json'}",
        f"limits.shared={shared.url}",
        "limits.deadline_ms=60000",
        "fetch.enabled=true",
    )
    (scratch / "keys.json").write_text(keys.model_dump_json())
    spec = ClusterSpec(tiny, {"encoder": 1, "prefill": 1, "decode": 1}, model_name="tiny", sets=sets, tls=True)
    with ExitStack() as stack:
        stack.callback(shared.kill)
        cluster = stack.enter_context(LocalCluster(spec, run_dir=scratch / "run"))
        files = files_of(cluster.run_dir / TLS_FOLDER, "client")
        identity = (f"tls.ca={files.ca}", f"tls.cert={files.cert}", f"tls.key={files.key}", "https.off=true")
        models = [
            served(cluster, "v4.1", thinking=True),
            served(cluster, "template", name="plain", folder=str(plain), router_model="tiny"),
        ]
        gateway = stack.enter_context(
            LocalGateway(
                models,
                sets=(*identity, "log.level=debug", f"responses.redis={shared.url}"),
                run_dir=scratch / "gateway",
            )
        )
        yield Served(cluster, gateway.url, scratch, keys, key, other, limited, shared.url)


@pytest.fixture
def client(world: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{world.url}/v1", api_key=world.key, max_retries=0, timeout=PATIENCE_S) as made:
        yield made
    world.until_idle()


def messages_client(world: Served, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=world.url, api_key=key, max_retries=0, timeout=PATIENCE_S)


def picture() -> str:
    file = io.BytesIO()
    PIL.Image.new("RGB", (64, 48), (200, 60, 40)).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_a_seed_fixes_the_answer_of_every_api(world: Served, client: openai.OpenAI) -> None:
    """L5: whole, streamed, as one of two choices, over each API: the same text for the same seed."""
    asked: Any = {"model": "plain", "messages": HI, "seed": 7, "max_tokens": 6}
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    stream = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    two = client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=1)
    assert two.choices[0].message.content == text
    assert two.choices[1].logprobs is not None
    response = client.responses.create(model="plain", input="Hi", max_output_tokens=6, extra_body={"seed": 7})
    assert response.output_text == text
    assert whole.usage is not None
    assert response.usage is not None
    assert response.usage.input_tokens == whole.usage.prompt_tokens


def test_an_image_in_every_api(world: Served, client: openai.OpenAI) -> None:
    """L27: its tokens are counted alike."""
    url = f"data:image/png;base64,{picture()}"
    chat: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    first = client.chat.completions.create(model="tiny", messages=chat, max_tokens=2, reasoning_effort="none")
    items: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}]
    second = client.responses.create(model="tiny", input=items, max_output_tokens=2, reasoning={"effort": "none"})
    source = {"type": "base64", "media_type": "image/png", "data": picture()}
    message: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with messages_client(world, world.key) as other:
        off: Any = {"type": "disabled"}
        third = other.messages.create(model="tiny", messages=message, max_tokens=2, thinking=off)
    assert first.usage is not None
    assert second.usage is not None
    read = third.usage.input_tokens + (third.usage.cache_read_input_tokens or 0)
    assert first.usage.prompt_tokens == second.usage.input_tokens == read > 10


def test_an_address_that_leads_inside_in_every_api(world: Served, client: openai.OpenAI) -> None:
    """L26: the router fetches, and refuses; the status is the request's fault."""
    url = "https://127.0.0.1/picture.png"
    chat: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    items: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}]
    source = {"type": "url", "url": url}
    message: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(openai.BadRequestError, match="public network") as told:
        client.chat.completions.create(model="tiny", messages=chat, max_tokens=2)
    assert told.value.param == "messages[0]"
    with pytest.raises(openai.BadRequestError, match="public network"):
        client.responses.create(model="tiny", input=items, max_output_tokens=2)
    with messages_client(world, world.key) as other, pytest.raises(anthropic.BadRequestError, match="public network"):
        other.messages.create(model="tiny", messages=message, max_tokens=2)


def test_rates_are_told_in_headers_and_when_they_are_over(world: Served, client: openai.OpenAI) -> None:
    """L12, L25: a tenant hears of its own rates, in each API's words; one without rates of none."""
    free = client.chat.completions.with_raw_response.create(model="plain", messages=HI, max_tokens=1)
    assert not [name for name in free.headers if "ratelimit" in name]
    limited = client.with_options(api_key=world.limited)
    asked: Any = {"model": "plain", "messages": HI, "max_tokens": 1}
    taken = limited.chat.completions.with_raw_response.create(**asked, stream=True)
    list(taken.parse())
    with pytest.raises(openai.RateLimitError) as chat:
        limited.chat.completions.create(**asked)
    with pytest.raises(openai.RateLimitError) as responses:
        limited.responses.create(model="plain", input="Hi", stream=True)
    for headers in (taken.headers, chat.value.response.headers, responses.value.response.headers):
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("1", "0")
        assert headers["x-ratelimit-reset-requests"].endswith("s")
        assert headers["x-ratelimit-limit-tokens"] == "100"
        assert 0 < int(headers["x-ratelimit-remaining-tokens"]) <= 100
    with messages_client(world, world.limited) as other, pytest.raises(anthropic.RateLimitError) as messages:
        other.messages.create(**asked)
    refused = messages.value.response.headers
    assert refused["anthropic-ratelimit-requests-remaining"] == "0"
    assert datetime.fromisoformat(refused["anthropic-ratelimit-requests-reset"]) > datetime.now(UTC)
    assert int(refused["retry-after"]) > 60


def test_responses_are_the_tenants(world: Served, client: openai.OpenAI) -> None:
    """L25: any key of the tenant finds them, one that was revoked or is another tenant's does not."""
    made = client.responses.create(model="plain", input="Hi", max_output_tokens=2)
    assert made.store is True
    other = client.with_options(api_key=world.other)
    assert other.responses.retrieve(made.id).id == made.id
    assert other.responses.create(model="plain", input="x", previous_response_id=made.id, max_output_tokens=2).store
    with pytest.raises(openai.NotFoundError):
        client.with_options(api_key=world.limited).responses.retrieve(made.id)
    revoked = next(one for one in world.keys.keys if one.id == other.api_key.split("_")[1])
    world.keys = world.keys.without(revoked.id, time.time())
    world.write_keys()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            other.models.list()
        except openai.AuthenticationError:
            break
        time.sleep(0.2)
    with pytest.raises(openai.AuthenticationError):
        other.responses.retrieve(made.id)
    with pytest.raises(openai.AuthenticationError):
        other.responses.create(model="plain", input="x", previous_response_id=made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


async def test_a_gateway_without_the_clusters_certificate_gets_nothing(world: Served) -> None:
    """L25: neither another authority's, nor none, nor plain text; one of role `client` is enough."""
    own = world.cluster.run_dir / TLS_FOLDER
    foreign = world.folder / "foreign"
    make_authority(foreign)
    strange = issue(foreign, Peer(PeerRole.CLIENT))
    good = files_of(own, "client")
    entry = ModelEntry(
        name="plain", router=world.cluster.router, folder=world.folder / "plain", protocol="template",
        router_model="tiny",
    )  # fmt: skip
    assets = load_assets(entry.folder, entry)

    async def tenant(tls: Tls | None) -> str:
        upstream = Upstream(entry, assets, RpcSettings(), tls, 20.0)
        try:
            return await upstream.tenant(world.key)
        finally:
            await upstream.close()

    assert await tenant(Tls(good.ca, good.cert, good.key)) == "acme"
    for tls in (Tls(good.ca, strange.cert, strange.key), Tls(good.ca, None, None), None):
        with pytest.raises((Unavailable, DeadlineExceeded)):
            await tenant(tls)
    with pytest.raises((Unavailable, DeadlineExceeded)):  # and a router of another authority is not believed
        await tenant(Tls(strange.ca, strange.cert, strange.key))


def test_a_marked_prefix_is_there_for_the_next_conversation(world: Served, client: openai.OpenAI) -> None:
    """L4, L27: with a mark the second conversation already finds the system's text, without one it does not."""
    marks: Any = {"marked": {"cache_control": {"type": "ephemeral"}}, "plain": {}}

    def read(name: str) -> int | None:
        """By the second of two conversations."""
        system: Any = [{"type": "text", "text": f"{name}: " + "You know all about water. " * 24, **marks[name]}]
        for question in ("What is a headrace? " * 15, "And a weir? " * 25):  # prompts' ends get snapshots anyway
            told = other.messages.create(
                model="tiny", max_tokens=1, system=system, messages=[{"role": "user", "content": question}]
            )
        return told.usage.cache_read_input_tokens

    with messages_client(world, world.key) as other, ThreadPoolExecutor(2) as pool:
        marked, plain = pool.map(read, marks)
    assert (marked or 0) >= 512
    assert plain == 0


def test_a_client_that_leaves(world: Served, client: openai.OpenAI) -> None:
    """L10: `client` waits until the router has nothing left."""
    stream = client.chat.completions.create(model="plain", messages=HI, stream=True, max_tokens=2000, seed=1)
    next(iter(stream))
    stream.close()


def test_what_the_router_limits(client: openai.OpenAI) -> None:
    """L13, in the API's own words."""
    with pytest.raises(openai.BadRequestError) as told:
        client.chat.completions.create(model="plain", messages=HI, n=100)
    assert told.value.param == "n"
    assert {model.id for model in client.models.list()} == {"tiny", "plain"}


def test_no_key_is_logged_or_kept(world: Served, client: openai.OpenAI) -> None:
    """L25: neither a log, the gateway's at debug level, nor Redis has a caller's credential."""
    assert client.responses.create(model="plain", input="Hi", max_output_tokens=2).store
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key=f"{world.key}x").models.list()
    secrets = [key.split("_", 2)[2].encode() for key in (world.key, world.other, world.limited)]
    logs = [path for folder in ("gateway", "run") for path in (world.folder / folder).rglob("*.log")]
    assert len(logs) >= 5
    kept = [path.read_bytes() for path in logs]
    with redis.Redis.from_url(world.redis) as server:
        names = server.keys("headrace:response:*")
        kept += [value for name in names if server.type(name) == b"string" and (value := server.get(name)) is not None]
        assert len(kept) > len(logs)
        kept += names
    assert not [one for one in kept for secret in secrets if secret in one]


ARGUMENTS: Any = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/n"}, "s": {"type": "string", "maxLength": 3}},
    "required": ["n", "s"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
}
"""Short: the vocabulary is bytes."""
ONE: Any = {
    "type": "object",
    "properties": {"n": {"enum": [7, None]}},
    "required": ["n"],
    "additionalProperties": False,
}


def tool(schema: Any, **more: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema, **more}}


FORCED: Any = {
    "messages": HI, "tools": [tool(ARGUMENTS)], "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False, "max_tokens": 400, "n": 2, "seed": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def called(world: Served) -> dict[str, Any]:
    """Answers with held calls, asked for at once, so that they share steps: forced ones of `plain` and `tiny`, and
    `own`, one of the model's own; and of both models a call and a text where either is held. Biases lead them to end
    their reasoning, and to open a call or an object."""
    tokenizer = Tokenizer.from_folder(world.cluster.spec.folder)
    (sign,), (brace,) = tokenizer.encode_plain("<"), tokenizer.encode_plain("{")
    biases = {str(sign): 50, str(tokenizer.special_id("｜DSML｜")): 100, str(tokenizer.special_id("</think>")): 60}
    either: Any = {"messages": HI, "tools": [tool(ONE, strict=True)], "parallel_tool_calls": False, "max_tokens": 300}
    either |= {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": ONE}}}
    leads = {"call": biases, "text": biases | {str(sign): -50, str(brace): 50}}
    own = {"messages": HI, "tools": [tool(ONE, strict=True)], "parallel_tool_calls": False, "logit_bias": biases}
    own |= {"model": "tiny", "max_tokens": 300, "seed": 3, "reasoning_effort": "high"}
    asked: Any = {"plain": {**FORCED, "model": "plain"}, "tiny": {**FORCED, "model": "tiny"}, "own": own}
    for branch, lead in leads.items():
        asked[f"plain {branch}"] = {**either, "model": "plain", "logit_bias": lead, "logprobs": True, "seed": 5}
        asked[f"tiny {branch}"] = {**either, "model": "tiny", "logit_bias": lead, "reasoning_effort": "high", "seed": 6}
    with (
        openai.OpenAI(base_url=f"{world.url}/v1", api_key=world.key, max_retries=0, timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(len(asked)) as pool,
    ):
        answers = pool.map(lambda one: client.chat.completions.create(**one), asked.values())
        return dict(zip(asked, answers, strict=True))


@pytest.mark.parametrize("model", ["plain", "tiny"])
def test_forced_calls_are_valid(called: dict[str, Any], client: openai.OpenAI, model: str) -> None:
    """L13: whatever a random model draws, in JSON and in V4.1's markup; what cannot be enforced is refused before."""
    for choice in called[model].choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or ()
        Draft202012Validator(ARGUMENTS).validate(json.loads(call.function.arguments))
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    bad = tool(unique, name="g", strict=True)
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as told:
        client.chat.completions.create(model=model, messages=HI, tools=[tool(ARGUMENTS), bad], max_tokens=1)
    assert told.value.param == "tools[1].function.parameters"


def test_a_strict_call_of_the_models_own(called: dict[str, Any], client: openai.OpenAI) -> None:
    """A model that opens a call by itself ends its reasoning first, and keeps to the schema."""
    (choice,) = called["own"].choices
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls"
    Draft202012Validator(ONE).validate(json.loads(call.function.arguments))


@pytest.mark.parametrize("model", ["plain", "tiny"])
def test_a_call_or_a_text_is_valid(called: dict[str, Any], model: str) -> None:
    """L13: with a schema beside a tool that may be called, either is an instance, and there is nothing beside it."""
    (call,), (text,) = called[f"{model} call"].choices, called[f"{model} text"].choices
    (one,) = call.message.tool_calls or ()
    assert (call.finish_reason, call.message.content or "") == ("tool_calls", "")
    Draft202012Validator(ONE).validate(json.loads(one.function.arguments))
    assert (text.finish_reason, text.message.tool_calls) == ("stop", None)
    Draft202012Validator(ONE).validate(json.loads(text.message.content))
    if model == "plain":
        assert call.logprobs is None or not call.logprobs.content
        assert b"".join(bytes(token.bytes) for token in text.logprobs.content).decode() == text.message.content
