"""Messages as the unmodified `anthropic` client sees them, before a router that says what the test wants."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from headrace.services.runtime.errors import ResourceExhausted, Unavailable
from headrace.v1 import common_pb2
from tests.services.gateway.fakes import TOKENIZER, World, fails, says

HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"x": {}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 5}}\n</tool_call>'


@pytest_asyncio.fixture
async def client(world: World) -> Any:
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key="key-1", max_retries=0) as made:
        yield made


async def test_an_answer_with_thinking(world: World, client: Any) -> None:
    """L27: uncached and cached tokens add up to the prompt."""
    world.router.script = says("why", "</think>", "hello", cached=4)
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    message = await client.messages.create(model="v41", max_tokens=2048, messages=HI, thinking=thinking)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("why", "hello")
    assert message.stop_reason == "end_turn"
    prompt = len(world.router.requests[0].prompt.tokens.token_ids)
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (prompt - 4, 4)
    assert message._request_id
    assert world.router.metadata[0]["authorization"] == "Bearer key-1"
    assert world.router.requests[0].stop.max_tokens == 512  # the model's most


async def test_a_stream(world: World, client: Any) -> None:
    world.router.script = says("why", "</think>", "hel", "lo", cached=4)
    async with client.messages.stream(model="v41", max_tokens=99, messages=HI) as stream:
        text = [piece async for piece in stream.text_stream]
        message = await stream.get_final_message()
    assert "".join(text) == "hello"
    assert (message.content[0].thinking, message.stop_reason) == ("why", "end_turn")
    assert message.usage.cache_read_input_tokens == 4
    assert message.usage.output_tokens > 0


async def test_a_stop_sequence(world: World, client: Any) -> None:
    world.router.script = says("ab", "END", stop_string="END")
    message = await client.messages.create(
        model="plain",
        max_tokens=9,
        messages=HI,
        stop_sequences=["END"],
        extra_body={"top_k": 4, "temperature": 0.5},
    )
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("ab", "stop_sequence", "END")
    request = world.router.requests[0]
    assert (list(request.stop.stop), request.sampling.top_k, request.sampling.temperature) == (["END"], 4, 0.5)


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}])
async def test_tools(world: World, client: Any, choice: Any) -> None:
    forced = choice["type"] != "auto"
    world.router.script = says(CALL.removeprefix("<tool_call>\n") if forced else CALL)
    asked = {"model": "plain", "max_tokens": 99, "tools": [TOOL], "tool_choice": choice}
    message = await client.messages.create(messages=HI, **asked)
    block = message.content[-1]
    assert (message.stop_reason, block.type, block.name, block.input) == ("tool_use", "tool_use", "f", {"x": 5})
    assert world.router.requests[0].HasField("constraint") is forced
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    history = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    await client.messages.create(messages=history, **asked)
    assert "sunny" in world.router.prompt_text()
    async with client.messages.stream(messages=HI, **asked) as stream:
        assert (await stream.get_final_message()).content[-1].input == {"x": 5}


async def test_a_schema_an_image_and_a_marked_prefix(world: World, client: Any) -> None:
    world.router.script = says("</think>{}")
    data = base64.b64encode(b"picture").decode()
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    system: Any = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    await client.messages.create(
        model="v41", max_tokens=9, messages=[{"role": "user", "content": [image]}], system=system,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )  # fmt: skip
    request = world.router.requests[0]
    assert request.prompt.tokens.images[0].data == b"picture"
    assert json.loads(request.constraint.json_schema) == schema
    assert list(request.constraint.after_token_ids) == [TOKENIZER.special_id("</think>")]
    assert request.traffic_class == common_pb2.TRAFFIC_CLASS_AGENT
    assert "be brief" in world.router.prompt_text()


async def test_marked_prefixes(world: World, client: Any) -> None:
    """L4: a snapshot is asked for where a marked prefix ends, in whole blocks and before the first image; the marks
    leave no trace in the prompt."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"picture").decode()}

    def turns(**more: Any) -> Any:
        result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "sunny"}], **more}
        picture = [{"type": "image", "source": source}, {"type": "text", "text": "see", **more}]
        asked = [{"type": "text", "text": "Where? " * 9, **more}, {"type": "text", "text": "x"}]
        return [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            {"role": "user", "content": [result, *picture]},
        ]

    world.router.script = says("</think>ok")
    body: Any = {"model": "v41", "max_tokens": 9, "system": "be brief", "tools": [TOOL]}
    await client.messages.create(**body, messages=turns())
    await client.messages.create(**{**body, "tools": [{**TOOL, **mark}]}, messages=turns(**mark))
    plain, marked = world.router.requests
    assert plain.prompt == marked.prompt
    assert (plain.traffic_class, list(plain.snapshot_at)) == (common_pb2.TRAFFIC_CLASS_UNSPECIFIED, [])
    assert marked.traffic_class == common_pb2.TRAFFIC_CLASS_AGENT
    ids = list(marked.prompt.tokens.token_ids)
    text = world.router.prompt_text()
    wanted = [text.index("<｜User｜>"), text.index("Where? " * 9) + 63, text.index("sunny") + 5]
    before = [len(TOKENIZER.encode_trusted(text[:end])) for end in wanted]
    assert list(marked.snapshot_at) == [count // 8 * 8 for count in before]
    assert max(marked.snapshot_at) < len(ids)


@pytest.mark.parametrize(
    ("mark", "field"),
    [
        ({"type": "forever"}, "system[0].cache_control"),
        ({"type": "ephemeral", "ttl": "2h"}, "system[0].cache_control.ttl"),
        ({"type": "ephemeral", "scope": "global"}, "system[0].cache_control.scope"),
    ],
)
async def test_marks_that_are_refused(client: Any, mark: Any, field: str) -> None:
    asked: Any = {"model": "v41", "max_tokens": 9, "messages": HI}
    with pytest.raises(anthropic.BadRequestError, match=re.escape(field)):
        await client.messages.create(**asked, system=[{"type": "text", "text": "x", "cache_control": mark}])
    good = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    with pytest.raises(anthropic.BadRequestError, match=r"system\[4\].cache_control: at most 4"):
        await client.messages.create(**asked, system=[good] * 5)


async def test_counted_tokens(world: World, client: Any) -> None:
    counted = await client.messages.count_tokens(model="plain", messages=HI, system="be brief")
    await client.messages.create(model="plain", max_tokens=5, messages=HI, system="be brief")
    assert counted.input_tokens == len(world.router.requests[0].prompt.tokens.token_ids)


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (ResourceExhausted("full", retry_after_s=2), anthropic.RateLimitError, 429),
        (Unavailable("nobody"), anthropic.InternalServerError, 503),
    ],
)
async def test_errors(world: World, client: Any, error: Any, kind: Any, status: int) -> None:
    """L12."""
    world.router.script = fails(error)
    with pytest.raises(kind) as told:
        await client.messages.create(model="plain", max_tokens=5, messages=HI)
    assert told.value.status_code == status
    assert told.value.body["type"] == "error"
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
        await client.messages.create(model="plain", max_tokens=5, messages=HI, extra_body={"mcp_servers": [1]})
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].type"):
        await client.messages.create(model="plain", max_tokens=5, messages=HI, tools=[search])


@pytest.mark.parametrize("model", ["plain", "v41"])
async def test_a_last_turn_of_the_assistant_is_continued(world: World, client: Any, model: str) -> None:
    messages = [*HI, {"role": "assistant", "content": "Once upon"}]
    message = await client.messages.create(model=model, max_tokens=5, messages=messages)
    assert [block.type for block in message.content] == ["text"]
    assert world.router.prompt_text().endswith("Once upon")


@pytest.mark.parametrize("model", ["plain", "v41"])
async def test_strict_tools(world: World, client: Any, model: str) -> None:
    """L13: a tool that cannot be enforced is named; a forced call is held, strict or not."""
    asked: Any = {"model": model, "max_tokens": 99, "messages": HI}
    await client.messages.create(**asked, tools=[{**TOOL, "strict": True}])
    assert world.router.requests[-1].constraint.structural_tag
    await client.messages.create(**asked, tools=[TOOL], tool_choice={"type": "any"})
    assert world.router.requests[-1].constraint.structural_tag
    await client.messages.create(**asked, tools=[TOOL])
    assert not world.router.requests[-1].HasField("constraint")
    with pytest.raises(anthropic.BadRequestError, match=r"output_config.format: .*'xml' is not supported"):
        await client.messages.create(**asked, extra_body={"output_config": {"format": {"type": "xml"}}})
    schema = {"type": "object", "properties": {"a b": {"type": "string"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].input_schema: cannot be enforced"):
        await client.messages.create(**asked, tools=[{**TOOL, "input_schema": schema, "strict": True}])
