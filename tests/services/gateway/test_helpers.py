"""What the helpers of the unmodified SDKs send and read: parsed answers and calls, beside each other, and streams."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import anthropic
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from headrace.v1 import inference_pb2
from tests.services.gateway.fakes import World, says

HI: Any = [{"role": "user", "content": "Hi, JSON please"}]
D = "｜DSML｜"


class Note(BaseModel):
    """An answer."""

    text: str
    kind: Literal["a", "b"] = "a"


class Weather(BaseModel):
    """Arguments of a call."""

    city: str


ANSWER = '{"text":"<tool_call>","kind":"b"}'
CALLS = {
    "plain": '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "v41": f'</think>\n\n<{D} calls>\n<{D} invoke name="Weather">\n'
    f'<{D} parameter name="city" string="true">Rome</{D} parameter>\n</{D} invoke>\n</{D} calls>',
}
ANSWERS = {"plain": ANSWER, "v41": f"why</think>{ANSWER}"}
MODELS = pytest.mark.parametrize("model", ["plain", "v41"])


@pytest_asyncio.fixture
async def client(world: World) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="key-1", max_retries=0) as made:
        yield made


@pytest_asyncio.fixture
async def messages(world: World) -> Any:
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key="key-1", max_retries=0) as made:
        yield made


def pieces(text: str) -> tuple[str, ...]:
    """Special tokens are whole in a model's output."""
    return tuple(re.findall(rf"</think>|{D}|[^<｜]{{1,5}}|<", text))


@anthropic.beta_async_tool
async def weather(city: str) -> str:
    """The weather."""
    return f"sunny in {city}"


@MODELS
@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_runner(world: World, messages: Any, model: str, stream: bool) -> None:
    """It asks for a thread first, hears that there are none, and sends the conversation; each turn may be parsed."""
    call, answer = CALLS[model].replace("Weather", "weather"), ANSWERS[model]

    async def script(request: inference_pb2.GenerateRequest) -> Any:
        async for event in says(*pieces(call if len(world.router.requests) == 1 else answer))(request):
            yield event

    world.router.script = script
    asked: Any = {"model": model, "max_tokens": 99, "messages": HI, "output_format": Note, "tools": [weather]}
    turns = []
    async for turn in messages.beta.messages.tool_runner(**asked, stream=stream):
        turns.append(await turn.get_final_message() if stream else turn)
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert turns[-1].parsed_output == Note(text="<tool_call>", kind="b")
    assert "sunny in Rome" in world.router.prompt_text()


@MODELS
async def test_chat_parse(world: World, client: Any, model: str) -> None:
    asked: Any = {"model": model, "messages": HI, "response_format": Note, "n": 2}
    asked["tools"] = [openai.pydantic_function_tool(Weather)]
    world.router.script = says(*pieces(ANSWERS[model]))
    for choice in (await client.chat.completions.parse(**asked)).choices:
        assert (choice.message.parsed, choice.message.tool_calls) == (Note(text="<tool_call>", kind="b"), None)
        assert choice.finish_reason == "stop"
    tag = world.router.requests[-1].constraint.structural_tag
    assert tag.count('"type":"json_schema"') == 2
    world.router.script = says(*pieces(CALLS[model]))
    for form in ({"type": "json_object"}, {"type": "text"}):
        plain = await client.chat.completions.create(**{**asked, "response_format": form})
        assert plain.choices[0].message.tool_calls[0].function.name == "Weather"
    for choice in (await client.chat.completions.parse(**asked)).choices:
        assert (choice.message.parsed, choice.message.content or "") == (None, "")
        assert choice.message.tool_calls[0].function.parsed_arguments == Weather(city="Rome")
        assert choice.finish_reason == "tool_calls"


@MODELS
async def test_chat_stream(world: World, client: Any, model: str) -> None:
    asked: Any = {"model": model, "messages": HI, "response_format": Note}
    asked |= {"tools": [openai.pydantic_function_tool(Weather)], "stream_options": {"include_usage": True}}
    for answers, calls in ((ANSWERS, 0), (CALLS, 1)):
        world.router.script = says(*pieces(answers[model]))
        async with client.chat.completions.stream(**asked, logprobs=True) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert (message.parsed is None, len(message.tool_calls or ())) == (calls == 1, calls)
        assert final.usage.completion_tokens > 0
        assert ("content.done" in kinds, "tool_calls.function.arguments.done" in kinds) == (not calls, bool(calls))
        assert ("logprobs.content.done" in kinds) is not bool(calls)


@MODELS
async def test_responses_parse_and_stream(world: World, client: Any, model: str) -> None:
    asked: Any = {"model": model, "input": HI, "text_format": Note}
    asked["tools"] = [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}]
    for answers, called in ((ANSWERS, False), (CALLS, True)):
        world.router.script = says(*pieces(answers[model]))
        response = await client.responses.parse(**asked)
        async with client.responses.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        for one in (response, streamed):
            assert one.output_parsed == (None if called else Note(text="<tool_call>", kind="b"))
            calls = [item for item in one.output if item.type == "function_call"]
            assert [json.loads(item.arguments) for item in calls] == ([{"city": "Rome"}] if called else [])
        assert ("response.function_call_arguments.done" in kinds) is called
        assert world.router.requests[-1].constraint.structural_tag


@MODELS
async def test_messages_parse_and_stream(world: World, messages: Any, model: str) -> None:
    tool = {"name": "Weather", "description": "d", "input_schema": Weather.model_json_schema(), "strict": True}
    asked: Any = {"model": model, "max_tokens": 99, "messages": HI, "output_format": Note, "tools": [tool]}
    for answers, called in ((ANSWERS, False), (CALLS, True)):
        world.router.script = says(*pieces(answers[model]))
        message = await messages.messages.parse(**asked)
        async with messages.messages.stream(**asked) as stream:
            text = [piece async for piece in stream.text_stream]
            streamed = await stream.get_final_message()
        assert ("".join(text) == "") is called
        for one in (message, streamed):
            assert one.parsed_output == (None if called else Note(text="<tool_call>", kind="b"))
            uses = [block.input for block in one.content if block.type == "tool_use"]
            assert uses == ([{"city": "Rome"}] if called else [])
            assert one.stop_reason == ("tool_use" if called else "end_turn")
        assert world.router.requests[-1].constraint.structural_tag
