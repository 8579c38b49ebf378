"""Responses as the unmodified `openai` client sees them, before a router that says what the test wants."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
import pytest_asyncio

from headrace.v1 import common_pb2, inference_pb2
from tests.services.gateway.fakes import World, finished_event, says, texts, tokens_event

TOOL: Any = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}


@pytest_asyncio.fixture
async def client(world: World) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="key-1", max_retries=0) as made:
        yield made


async def test_an_answer_with_reasoning(world: World, client: Any) -> None:
    world.router.script = says("why", "</think>", "hello", cached=4)
    response = await client.responses.create(
        model="v41", input="Hi", instructions="be brief", metadata={"a": "b"}, max_output_tokens=77
    )
    assert (response.status, response.output_text, response.metadata) == ("completed", "hello", {"a": "b"})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    usage = response.usage
    assert (usage.input_tokens_details.cached_tokens, usage.total_tokens) == (
        4,
        usage.input_tokens + usage.output_tokens,
    )
    assert usage.output_tokens_details.reasoning_tokens >= 3
    assert world.router.requests[0].stop.max_tokens == 77
    assert "be brief" in world.router.prompt_text()


async def test_a_stream(world: World, client: Any) -> None:
    world.router.script = says("hel", "lo", reason=common_pb2.FINISH_REASON_LENGTH)
    stream = await client.responses.create(model="plain", input="Hi", stream=True)
    events = [event async for event in stream]
    assert texts([event.delta for event in events if event.type == "response.output_text.delta"]) == "hello"
    assert events[0].type == "response.created"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert (last.type, last.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
    assert last.response.usage.output_tokens == 5


async def test_it_goes_on_from_a_stored_one(world: World, client: Any) -> None:
    """L12: bounded for each tenant; L25: another tenant finds nothing, and a key that is good no more is refused."""
    world.router.script = says("Paris")
    first = await client.responses.create(model="plain", input="France?")
    assert first.store is True
    second = await client.responses.create(model="plain", input="Germany?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    prompt = world.router.prompt_text()
    assert prompt.index("France?") < prompt.index("Paris") < prompt.index("Germany?")
    assert (await client.responses.retrieve(first.id)).output_text == "Paris"
    items = await client.responses.input_items.list(second.id)
    assert [item.role for item in items.data] == ["user", "assistant", "user"]
    world.router.tenants = {"rotated": "of key-1"}
    assert (await client.with_options(api_key="rotated").responses.retrieve(first.id)).output_text == "Paris"
    stranger = client.with_options(api_key="key-2")
    with pytest.raises(openai.NotFoundError):
        await stranger.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        await stranger.responses.create(model="plain", input="x", previous_response_id=first.id)
    with pytest.raises(openai.NotFoundError):
        await stranger.responses.delete(first.id)
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    world.router.known_keys = frozenset({"key-2"})
    with pytest.raises(openai.AuthenticationError):
        await client.responses.retrieve(second.id)
    world.router.known_keys = None
    for _ in range(3):
        await client.responses.create(model="plain", input="another")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)
    unstored = await client.responses.create(model="plain", input="x", store=False)
    assert unstored.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unstored.id)


async def test_tools_and_their_outputs(world: World, client: Any) -> None:
    world.router.script = says('<tool_call>\n{"name": "f", "arguments": {"x": 5}}\n</tool_call>')
    response = await client.responses.create(model="plain", input="Hi", tools=[TOOL])
    call = next(item for item in response.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("f", {"x": 5})
    world.router.script = says("sunny it is")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = await client.responses.create(
        model="plain", input=[output], tools=[TOOL], previous_response_id=response.id
    )
    assert answer.output_text == "sunny it is"
    assert "<tool_response>\nsunny" in world.router.prompt_text()


async def test_schema_logprobs_and_images(world: World, client: Any) -> None:
    world.router.script = says("</think>", "ab")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    await client.responses.create(model="plain", input="Hi", text=form)
    assert json.loads(world.router.requests[-1].constraint.json_schema)["required"] == ["a"]
    answer = await client.responses.create(model="plain", input="Hi", user="u", prompt_cache_retention="24h")
    assert (answer.user, answer.prompt_cache_retention) == ("u", "24h")
    form = {"format": {"type": "regex", "regex": "[ab]+"}}
    for model, tools in (("plain", []), ("v41", []), ("plain", [TOOL]), ("v41", [TOOL])):
        answer = await client.responses.create(model=model, input="Hi", text=form, tools=tools)
        held = world.router.requests[-1].constraint
        assert (held.regex == "[ab]+", '"never":' in held.structural_tag) == (not tools, bool(tools))
        assert (answer.text.format.type, answer.text.format.regex) == ("regex", "[ab]+")
    picture: Any = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "what?"}, picture]}]
    response = await client.responses.create(
        model="v41", input=asked, include=["message.output_text.logprobs"], top_logprobs=1
    )
    told = response.output[-1].content[0].logprobs
    assert [one.token for one in told] == ["a", "b"]
    assert world.router.requests[-1].prompt.tokens.images[0].data == b"\0\0\0"


async def test_a_router_that_does_not_say_who_calls(world: World, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an older version: whose the answer is nobody knows, so it is given and not kept (L25)."""
    monkeypatch.setattr("headrace.services.gateway.responses.caller_of", lambda _request: None)
    response = await client.responses.create(model="plain", input="hi")
    assert (response.status, response.output_text) == ("completed", "hello")
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_what_is_refused(world: World, client: Any) -> None:
    for body, param in (
        ({"background": True}, "background"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"conversation": "c"}, "conversation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"text": {"format": {"type": "grammar", "grammar": 'root ::= "x"'}}, "tools": [TOOL]}, "text.format"),
    ):
        with pytest.raises(openai.BadRequestError) as told:
            await client.responses.create(**{"model": "plain", "input": "Hi", "extra_body": body})
        assert told.value.param == param


async def test_a_failure_in_the_middle(world: World, client: Any) -> None:
    """L28: one end, and it says what happened."""
    failed = common_pb2.Error(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="decode died")

    async def script(_request: inference_pb2.GenerateRequest) -> Any:
        yield inference_pb2.GenerateResponse(started=inference_pb2.StartedEvent(prompt_tokens=3))
        yield tokens_event("a")
        yield finished_event(0, common_pb2.FINISH_REASON_ERROR, error=failed)

    world.router.script = script
    events = [event async for event in await client.responses.create(model="plain", input="Hi", stream=True)]
    assert (events[-1].type, events[-1].response.error.message) == ("response.failed", "decode died")


@pytest.mark.parametrize("model", ["plain", "v41"])
async def test_strict_tools(world: World, client: Any, model: str) -> None:
    """In namespaces, too. L13: the tool is named."""
    bad = {"type": "object", "properties": {"a b": {"type": "string"}}}
    strict = {**TOOL, "name": "s", "parameters": bad, "strict": True}
    space: Any = {"type": "namespace", "name": "n", "description": "d", "tools": [strict]}
    for tools, param in (([TOOL, strict], "tools[1].parameters"), ([TOOL, space], "tools[1].tools[0].parameters")):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=model, input="Hi", tools=tools)
        assert refused.value.param == param
    given: Any = {**TOOL, "strict": True}
    answer = await client.responses.create(model=model, input="Hi", tools=[given])
    assert answer.status == "completed"
    assert answer.tools[0].strict is True
    assert world.router.requests[-1].constraint.structural_tag
    forced = await client.responses.create(model=model, input="Hi", tools=[TOOL], tool_choice="required", store=False)
    assert (forced.status, forced.tool_choice, forced.tools[0].strict) == ("completed", "required", None)
    assert world.router.requests[-1].constraint.structural_tag
