"""Chat Completions as the unmodified `openai` client sees them, before a router that says what the test wants."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import openai
import pytest
import pytest_asyncio

from headrace.engine.masks.library import xgrammar
from headrace.engine.text.structural_tags import from_structural_tag
from headrace.services.runtime.errors import (
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from headrace.v1 import common_pb2, inference_pb2
from tests.services.gateway.fakes import FILE, World, fails, finished_event, says, texts, tokens_event, until

HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {}}}},
}
DSML = "｜DSML｜"
STARTED = inference_pb2.GenerateResponse(started=inference_pb2.StartedEvent(prompt_tokens=3))


@pytest_asyncio.fixture
async def client(world: World) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="key-1", max_retries=0) as made:
        yield made


async def test_an_answer_with_reasoning(world: World, client: Any) -> None:
    """L27: the usage's parts add up to the prompt; the key goes on to the router (L25)."""
    world.router.script = says("why", "</think>", "hello", "<｜end▁of▁sentence｜>", cached=4)
    raw = await client.chat.completions.with_raw_response.create(model="v41", messages=HI, seed=5)
    answer = raw.parse()
    message, usage = answer.choices[0].message, answer.usage
    assert (message.content, message.reasoning_content, answer.choices[0].finish_reason) == ("hello", "why", "stop")
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_cache_hit_tokens == 4
    assert usage.prompt_cache_hit_tokens + usage.prompt_cache_miss_tokens == usage.prompt_tokens
    assert usage.completion_tokens_details.reasoning_tokens >= 3
    assert answer.system_fingerprint.startswith("fp_")
    assert raw.headers["x-request-id"]
    assert world.router.metadata[0]["authorization"] == "Bearer key-1"
    assert world.router.metadata[0]["x-request-id"] == raw.headers["x-request-id"]
    assert world.router.requests[0].sampling.seed == 5
    assert world.router.prompt_text().endswith("<｜User｜>Hi<｜Assistant｜><think>")


async def test_a_stream(world: World, client: Any) -> None:
    world.router.script = says("why", "</think>", "hel", "lo")
    stream = await client.chat.completions.create(
        model="v41", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert texts([chunk.choices[0].delta.content for chunk in chunks if chunk.choices]) == "hello"
    assert texts([getattr(c.choices[0].delta, "reasoning_content", "") for c in chunks if c.choices]) == "why"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_two_choices_with_logprobs(world: World, client: Any) -> None:
    """L28: one end per choice."""
    world.router.script = says("ab")
    answer = await client.chat.completions.create(model="plain", messages=HI, n=2, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert [one.token for one in choice.logprobs.content] == ["a", "b"]
        assert len(choice.logprobs.content[0].top_logprobs) == 2
    stream = await client.chat.completions.create(model="plain", messages=HI, n=2, stream=True)
    ends = [c.choices[0].index async for c in stream if c.choices[0].finish_reason]
    assert sorted(ends) == [0, 1]


@pytest.mark.parametrize("model", ["v41", "plain"])
async def test_tool_calls(world: World, client: Any, model: str) -> None:
    """DeepSeek's markup and the Hermes form reach the client in one way."""
    parameter = f'<{DSML} parameter name="x" string="false">5</{DSML} parameter>'
    v41 = f'</think><{DSML} calls>\n<{DSML} invoke name="f">\n{parameter}\n</{DSML} invoke>\n</{DSML} calls>'
    hermes = 'Let me.\n<tool_call>\n{"name": "f", "arguments": {"x": 5}}\n</tool_call>'
    text = v41 if model == "v41" else hermes
    world.router.script = says(*(text[at : at + 7] for at in range(0, len(text), 7)))
    if model == "v41":  # special tokens are whole in the model's output
        world.router.script = says(text)
    answer = await client.chat.completions.create(model=model, messages=HI, tools=[TOOL])
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"x": 5})
    assert '"name": "f"' in world.router.prompt_text()
    stream = await client.chat.completions.create(model=model, messages=HI, tools=[TOOL], stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    parts = [call for delta in deltas for call in delta.tool_calls or ()]
    assert parts[0].function.name == "f"
    assert json.loads(texts([part.function.arguments for part in parts])) == {"x": 5}
    history = [*HI, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    await client.chat.completions.create(model=model, messages=history, tools=[TOOL])
    assert "sunny" in world.router.prompt_text()


async def test_a_forced_tool(world: World, client: Any) -> None:
    world.router.script = says('{"name": "f", "arguments": {"x": [1]}}')
    choice: Any = {"type": "function", "function": {"name": "f"}}
    answer = await client.chat.completions.create(model="plain", messages=HI, tools=[TOOL], tool_choice=choice)
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"x": [1]}
    request = world.router.requests[-1]
    assert '"json_schema":{"type":"object","properties":{"x":{}}' in request.constraint.structural_tag
    assert world.router.prompt_text().endswith("<tool_call>\n")


@pytest.mark.parametrize("parallel", [True, False])
async def test_some_tool(world: World, client: Any, parallel: bool) -> None:
    """`required`: one call, and behind it as many more as the model likes, unless the client forbids them."""
    call = '{{"name":"f","arguments":{{"x":{}}}}}'
    first, second = call.format(1), call.format(2)
    text = f"{first}\n</tool_call>\n<tool_call>\n{second}\n</tool_call>" if parallel else first
    world.router.script = says(*text.partition("}}"))
    asked: Any = {"model": "plain", "messages": HI, "tools": [TOOL], "tool_choice": "required"}
    asked["parallel_tool_calls"] = parallel
    calls = (await client.chat.completions.create(**asked)).choices[0].message.tool_calls
    assert [json.loads(one.function.arguments) for one in calls] == [{"x": 1}, {"x": 2}][: 1 + parallel]
    assert len({one.id for one in calls}) == len(calls)
    constraint = world.router.requests[-1].constraint
    tag = xgrammar.Grammar.from_structural_tag(from_structural_tag(constraint.structural_tag).text)
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(tag)
    closed = f"{first}\n</tool_call>"
    for output, good in ((text, True), (closed, parallel), (first, not parallel), ("", False)):
        matcher = xgrammar.GrammarMatcher(compiled)
        assert (matcher.accept_string(output) and matcher.accept_token(0)) is good, output
    assert not xgrammar.GrammarMatcher(compiled).accept_string(text.replace("}", ",}"))


STRICT: Any = {"type": "function", "function": {**TOOL["function"], "name": "s", "strict": True}}


@pytest.mark.parametrize(("model", "form"), [("plain", "triggered_tags"), ("v41", "token")])
async def test_strict_tools(world: World, client: Any, model: str, form: str) -> None:
    """A strict tool holds all calls; without one they are free. A refusal at the router names the tool."""
    asked: Any = {"model": model, "messages": HI, "tools": [TOOL, STRICT]}
    await client.chat.completions.create(**asked)
    held = world.router.requests[-1].constraint
    assert f'"type":"{form}"' in held.structural_tag
    assert not held.after_token_ids
    await client.chat.completions.create(**{**asked, "tools": [TOOL]})
    assert not world.router.requests[-1].HasField("constraint")
    await client.chat.completions.create(**asked, tool_choice="none")
    assert not world.router.requests[-1].HasField("constraint")
    parts = held.structural_tag.split('"json_schema":{"type":"object"')
    assert len(parts) == 3
    assert '"properties"' not in parts[1].split('"allOf"')[0]
    path = "format.tags[0].content.elements[1].elements[1].elements[1]"
    if model == "v41":
        path = "format.elements[3].content.elements[3].content.elements[1].elements[3]"
    told = InvalidArgument(f"{path}: uniqueItems: no grammar", field="constraint.structural_tag")
    world.router.script = fails(told)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="cannot be enforced: uniqueItems") as refused:
            await client.chat.completions.create(**asked, stream=stream)
        assert refused.value.param == "tools[1].function.parameters"
    form = {"type": "grammar", "grammar": 'root ::= "a"'}
    with pytest.raises(openai.BadRequestError, match="could read like a call") as refused:
        await client.chat.completions.create(**asked, extra_body={"response_format": form})
    assert refused.value.param == "response_format"
    bad = {"type": "function", "function": {**TOOL["function"], "strict": "yes"}}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=model, messages=HI, tools=[bad])
    assert refused.value.param == "tools[0].function.strict"


async def test_a_forced_v41_call(world: World, client: Any) -> None:
    """Direct, or behind the reasoning if the request wants that; one call alone with parallel_tool_calls: false."""
    call = (
        f'<{DSML} invoke name="f">\n<{DSML} parameter name="x" string="false">5</{DSML} parameter>\n</{DSML} invoke>\n'
    )
    asked: Any = {"model": "v41", "messages": HI, "tools": [TOOL, STRICT]}
    one: Any = {"type": "function", "function": {"name": "f"}}
    world.router.script = says(f"{call}</{DSML} calls>")
    answer = await client.chat.completions.create(**asked, tool_choice=one)
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"x": 5}
    assert world.router.prompt_text().endswith(f"</think>\n\n<{DSML} calls>\n")
    assert world.router.requests[-1].constraint.structural_tag.count('"json_schema":') == 1
    world.router.script = says("why", f"</think>\n\n<{DSML} calls>\n{call}</{DSML} calls>")
    answer = await client.chat.completions.create(**asked, tool_choice=one, reasoning_effort="high")
    assert world.router.prompt_text().endswith("<think>")
    message = answer.choices[0].message
    assert (message.reasoning_content, message.tool_calls[0].function.name) == ("why", "f")
    held = world.router.requests[-1].constraint.structural_tag
    assert '"plus"' not in held
    assert '"optional"' not in held
    await client.chat.completions.create(**asked, tool_choice="required", reasoning_effort="high")
    assert '"plus"' in world.router.requests[-1].constraint.structural_tag
    await client.chat.completions.create(**{**asked, "tools": [TOOL]}, parallel_tool_calls=False)
    held = world.router.requests[-1].constraint.structural_tag
    assert '"plus"' not in held
    assert '"optional"' in held
    assert not world.router.requests[-1].stop.stop
    await client.chat.completions.create(model="plain", messages=HI, tools=[STRICT], parallel_tool_calls=False)
    assert '"stop_after_first":true' in world.router.requests[-1].constraint.structural_tag
    assert not world.router.requests[-1].stop.stop
    await client.chat.completions.create(model="plain", messages=HI, tools=[TOOL], parallel_tool_calls=False)
    assert list(world.router.requests[-1].stop.stop) == ["</tool_call>"]
    assert not world.router.requests[-1].HasField("constraint")


async def test_what_samples_goes_on(world: World, client: Any) -> None:
    await client.chat.completions.create(
        model="plain", messages=HI, temperature=0.5, top_p=0.25, presence_penalty=1, frequency_penalty=-1, n=1,
        logit_bias={"7": -3}, stop=["x", "y"], max_completion_tokens=9, prompt_cache_key="k", user="u",
        extra_body={"top_k": 3, "min_p": 0.125, "repetition_penalty": 1.5},
        extra_headers={"x-headrace-class": "agent", "x-headrace-priority": "-2", "x-headrace-timeout-ms": "5000"},
    )  # fmt: skip
    request = world.router.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 3, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert [(bias.token_id, bias.bias) for bias in sampling.logit_bias] == [(7, -3)]
    assert (list(request.stop.stop), request.stop.max_tokens) == (["x", "y"], 9)
    assert (request.traffic_class, request.priority, request.timeout_ms) == (common_pb2.TRAFFIC_CLASS_AGENT, -2, 5000)


async def test_images(world: World, client: Any) -> None:
    """A spelling of the placeholder in a text is text; addresses are the router's to fetch (L26)."""
    url = "data:image/png;base64," + base64.b64encode(b"picture").decode()
    content: Any = [
        {"type": "text", "text": "see <｜image｜>"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    ]
    await client.chat.completions.create(model="v41", messages=[{"role": "user", "content": content}])
    prompt = world.router.requests[0].prompt.tokens
    assert list(prompt.token_ids).count(FILE.image_token_id) == 2
    assert (prompt.images[0].data, prompt.images[1].url) == (b"picture", "https://example.org/a.png")
    assert prompt.images[0].resize.max_image_tokens == 128
    for field in ("prompt.tokens.images[1].data", "images[1].data"):  # the router's, an encoder's
        world.router.script = fails(InvalidArgument("is no picture", field=field))
        with pytest.raises(openai.BadRequestError) as told:
            await client.chat.completions.create(model="v41", messages=[*HI, {"role": "user", "content": content}])
        assert told.value.param == "messages[1]"
    with pytest.raises(openai.BadRequestError, match="takes no images"):
        await client.chat.completions.create(model="plain", messages=[{"role": "user", "content": content}])


async def test_a_prefix_is_continued(world: World, client: Any) -> None:
    prefix: Any = [*HI, {"role": "assistant", "content": "Once upon", "prefix": True}]
    await client.chat.completions.create(model="plain", messages=prefix)
    assert world.router.prompt_text().endswith("[assistant]Once upon")
    await client.chat.completions.create(model="v41", messages=prefix)
    assert world.router.prompt_text().endswith("</think>Once upon")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"bogus": 1}, "bogus"),
        ({"temperature": 3}, "temperature"),
        ({"audio": {}}, "audio"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "no"}}, "stream_options.include_usage"),
    ],
)
async def test_a_bad_field_is_named(world: World, client: Any, body: dict[str, Any], param: str) -> None:
    """L13."""
    with pytest.raises(openai.BadRequestError) as told:
        await client.chat.completions.create(model="plain", messages=HI, extra_body=body)
    assert told.value.param == param
    assert not world.router.requests


@pytest.mark.parametrize(
    ("error", "kind", "param"),
    [
        (ResourceExhausted("full", retry_after_s=2.5), openai.RateLimitError, None),
        (Unavailable("nobody", retry_after_s=1), openai.InternalServerError, None),
        (Unimplemented("constraint"), openai.BadRequestError, "response_format"),
        (InvalidArgument("too many", field="stop.max_tokens"), openai.BadRequestError, "max_tokens"),
        (Internal("defect"), openai.InternalServerError, None),
    ],
)
async def test_what_the_router_refuses(world: World, client: Any, error: Any, kind: Any, param: str | None) -> None:
    """L12: overload is 429 with a time to come back, and no unavailability."""
    world.router.script = fails(error)
    for stream in (False, True):
        with pytest.raises(kind) as told:
            await client.chat.completions.create(model="plain", messages=HI, stream=stream)
        assert told.value.param == param
    if isinstance(error, ResourceExhausted):
        assert told.value.response.headers["retry-after"] == "3"
        assert told.value.response.headers["retry-after-ms"] == "2500"


async def test_who_is_not_known(world: World, client: Any) -> None:
    world.router.known_keys = frozenset({"other"})
    with pytest.raises(openai.AuthenticationError):
        await client.chat.completions.create(model="plain", messages=HI)
    with pytest.raises(openai.NotFoundError, match="served here: v41, plain"):
        await client.chat.completions.create(model="gpt-9", messages=HI)
    with pytest.raises(openai.AuthenticationError):
        await client.models.list()
    world.router.known_keys = None
    assert [model.id async for model in await client.models.list()] == ["v41", "plain", "other-name"]


async def test_an_error_after_the_first_token(world: World, client: Any) -> None:
    """L28."""
    failed = common_pb2.Error(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="decode died")

    async def script(_request: inference_pb2.GenerateRequest) -> Any:
        yield STARTED
        yield tokens_event("a")
        yield finished_event(0, common_pb2.FINISH_REASON_ERROR, error=failed)

    world.router.script = script
    stream = await client.chat.completions.create(model="plain", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="decode died"):
        [chunk async for chunk in stream]
    with pytest.raises(openai.InternalServerError, match="decode died"):
        await client.chat.completions.create(model="plain", messages=HI)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves(world: World, client: Any, stream: bool) -> None:
    """L10: its request ends at the router. Until then the stream is never silent."""

    async def script(_request: inference_pb2.GenerateRequest) -> Any:
        yield STARTED
        yield tokens_event("a")
        await asyncio.Event().wait()

    world.router.script = script
    if stream:
        async with client.chat.completions.with_streaming_response.create(
            model="plain", messages=HI, stream=True
        ) as response:
            async for line in response.iter_lines():
                if line == ": keep-alive":
                    break
    else:
        asking = asyncio.ensure_future(client.chat.completions.create(model="plain", messages=HI))
        await until(lambda: bool(world.router.requests))
        asking.cancel()
    await asyncio.wait_for(world.router.ended.wait(), 60)
    await until(lambda: not len(world.gateway.door.live))
    assert 'headrace_http_requests_ended_total{outcome="cancelled"} 1.0' in world.gateway.metrics.render()


async def test_completions(world: World, client: Any) -> None:
    world.router.script = says("ab", "c")
    answer = await client.completions.create(model="plain", prompt="Once", logprobs=1, max_tokens=5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "stop")
    assert answer.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2]
    stream = await client.completions.create(model="plain", prompt=[5, 6], stream=True)
    assert texts([chunk.choices[0].text async for chunk in stream]) == "abc"
    assert list(world.router.requests[-1].prompt.tokens.token_ids) == [5, 6]
