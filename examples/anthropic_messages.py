"""Messages with the official `anthropic` client: text, streams, a schema, tools, images, thinking, counted tokens,
leaving.

.venv/bin/python examples/anthropic_messages.py
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
from gateway import IMAGES, PARAMETERS, SCHEMA, STORY, TEXT, Gateway, check, gateway, picture

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


def text(client: anthropic.Anthropic) -> None:
    """An answer at once, and as a stream."""
    message = client.messages.create(model=TEXT, messages=QUESTION, max_tokens=32, extra_body={"temperature": 0})
    said = message.content[0].text if message.content[0].type == "text" else ""
    check("Paris" in said, f"an answer: {said!r}, {message.stop_reason}")
    with client.messages.stream(model=TEXT, messages=QUESTION, max_tokens=32, extra_body={"temperature": 0}) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    check("".join(pieces) == said, f"the same as a stream of {len(pieces)} pieces")
    check(final.usage.output_tokens > 0, f"its usage, {final.usage.cache_read_input_tokens} tokens from the cache")
    counted = client.messages.count_tokens(model=TEXT, messages=QUESTION)
    read = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    check(counted.input_tokens == read, f"{counted.input_tokens} tokens, as counted before")


def forms(client: anthropic.Anthropic) -> None:
    """An answer in the form of a schema."""
    form = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "temperature": 0}
    message = client.messages.create(model=TEXT, messages=QUESTION, max_tokens=64, extra_body=form)
    document = json.loads(message.content[0].text if message.content[0].type == "text" else "")
    check(set(document) == {"city", "country"}, f"a schema: {document}")


def tools(client: anthropic.Anthropic) -> None:
    """A tool that has to be called, its call as a stream, and an answer from its result."""
    tool: Any = {"name": "get_weather", "description": "The weather in a city", "input_schema": PARAMETERS}
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    common: Any = {"model": TEXT, "messages": asked, "tools": [tool], "max_tokens": 64}
    common |= {"extra_body": {"temperature": 0}}
    some: Any = {"type": "any", "disable_parallel_tool_use": True}
    message = client.messages.create(tool_choice=some, **common)
    block = message.content[-1]
    if block.type != "tool_use":
        raise SystemExit(f"✗ a tool: {block}")
    check("city" in block.input, f"a tool: {block.name}({block.input})")
    with client.messages.stream(tool_choice=some, **common) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        last = stream.get_final_message().content[-1]
    check(last.type == "tool_use" and last.input == block.input, f"the same call as a stream of {len(pieces)} pieces")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "18 °C, rain"}
    asked += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(tool_choice={"type": "none"}, **common).content[0]
    check(answer.type == "text" and bool(answer.text), f"its result read: {answer}")


def images(client: anthropic.Anthropic) -> None:
    """A picture, for the model with a vision tower. Its weights are random, so its words mean nothing."""
    data = picture().partition(",")[2]
    words = {"type": "text", "text": "What is this?"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    plain: Any = [{"role": "user", "content": [words]}]
    asked: Any = [{"role": "user", "content": [image, words]}]
    off: Any = {"type": "disabled"}
    usages = [
        client.messages.create(model=IMAGES, messages=one, max_tokens=8, thinking=off).usage for one in (plain, asked)
    ]
    without, with_image = (usage.input_tokens + (usage.cache_read_input_tokens or 0) for usage in usages)
    check(with_image - without > 1, f"an image of {with_image - without} tokens")


def thinking(client: anthropic.Anthropic) -> None:
    """Thinking in blocks of its own."""
    enabled: Any = {"type": "enabled", "budget_tokens": 1024}
    message = client.messages.create(model=IMAGES, messages=QUESTION, max_tokens=1500, thinking=enabled)
    check(message.content[0].type == "thinking", f"thinking, {message.usage.output_tokens} tokens")


def cancellation(client: anthropic.Anthropic, front: Gateway) -> None:
    """Leaving a stream ends its request."""
    asked: Any = [{"role": "user", "content": STORY}]
    with front.cancels(), client.messages.stream(model=TEXT, messages=asked, max_tokens=1000) as stream:
        next(iter(stream.text_stream))


def main() -> None:
    """All of it."""
    with gateway() as front, anthropic.Anthropic(base_url=front.url, api_key="any", timeout=120) as client:
        names = [model.id for model in client.models.list()]
        check({TEXT, IMAGES} <= set(names), f"models: {', '.join(names)}")
        for part in (text, forms, tools, images, thinking):
            part(client)
        cancellation(client, front)


if __name__ == "__main__":
    main()
