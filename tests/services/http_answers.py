"""The same request by each API of a gateway, as the official clients read its stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai

from tests.services.cluster import PATIENCE_S

Act = Callable[[], object]
Ask = Callable[[str, Mapping[str, Any]], Iterator[str]]
"""URL of the gateway and a schema → pieces of the answer. An empty one says that the answer has begun."""
MODEL, SEED, MAX_TOKENS = "plain", 7, 300
TURN: Any = [{"role": "user", "content": "List them"}]
TEMPERATURE = 0.9


def chat(url: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Chat Completions, the text held to the schema."""
    held: Any = {"type": "json_schema", "json_schema": {"name": "record", "schema": schema}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as client:
        for chunk in client.chat.completions.create(
            model=MODEL, messages=TURN, stream=True, seed=SEED, temperature=TEMPERATURE, max_tokens=MAX_TOKENS,
            response_format=held,
        ):  # fmt: skip
            for choice in chunk.choices:
                yield choice.delta.content or ""
                assert choice.finish_reason in (None, "stop")


def responses(url: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Responses, the text held to the schema."""
    held: Any = {"format": {"type": "json_schema", "name": "record", "schema": schema}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as client:
        for event in client.responses.create(
            model=MODEL, input=TURN, stream=True, temperature=TEMPERATURE, max_output_tokens=MAX_TOKENS, text=held,
            extra_body={"seed": SEED},
        ):  # fmt: skip
            if event.type == "response.output_text.delta":
                yield event.delta
            assert event.type not in ("response.failed", "response.incomplete", "error"), event


def messages(url: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Messages, a tool forced whose arguments the schema describes. They come together, when the call is whole."""
    tool: Any = {"name": "record", "description": "Records them", "input_schema": schema}
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=PATIENCE_S) as client:
        for event in client.messages.create(
            model=MODEL, messages=TURN, stream=True, max_tokens=MAX_TOKENS, tools=[tool],
            tool_choice={"type": "tool", "name": "record"}, extra_body={"seed": SEED, "temperature": TEMPERATURE},
        ):  # fmt: skip
            if event.type == "message_start":
                yield ""
            elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                yield event.delta.partial_json
            elif event.type == "message_delta":
                assert event.delta.stop_reason == "tool_use"


APIS: tuple[Ask, ...] = (chat, responses, messages)


def answer(ask: Ask, url: str, schema: Mapping[str, Any], act: Act | None = None) -> str:
    """Text or arguments; `act` is done once in the middle."""
    text = ""
    for piece in ask(url, schema):
        text += piece
        if act is not None and (len(text) >= 10 or not piece):
            act()
            act = None
    assert act is None, "the stream ended before it was disturbed"
    return text


def at_once(url: str, schema: Mapping[str, Any], act: Act | None = None) -> list[str]:
    """`answer` of every API, together."""
    with ThreadPoolExecutor(len(APIS)) as pool:
        return list(pool.map(lambda ask: answer(ask, url, schema, act), APIS))
