"""Messages with the official `anthropic` client: text, streams, tools, a schema, images, thinking, counted tokens.

.venv/bin/python examples/anthropic_messages.py
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
from gateway import IMAGES, PARAMETERS, SCHEMA, TEXT, check, gateway, if_served, picture

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
    """A schema, and a tool that has to be called."""
    message = if_served(
        "a schema",
        lambda: client.messages.create(
            model=TEXT,
            messages=QUESTION,
            max_tokens=64,
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "temperature": 0},
        ),
        anthropic.BadRequestError,
    )
    if message is not None:
        document = json.loads(message.content[0].text if message.content[0].type == "text" else "")
        check(set(document) == {"city", "country"}, f"a schema: {document}")
    tool: Any = {"name": "get_weather", "description": "The weather in a city", "input_schema": PARAMETERS}
    asked: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    message = if_served(
        "a tool",
        lambda: client.messages.create(
            model=TEXT, messages=asked, tools=[tool], tool_choice={"type": "any"}, max_tokens=64
        ),
        anthropic.BadRequestError,
    )
    if message is not None:
        block = message.content[-1]
        check(block.type == "tool_use" and "city" in block.input, f"a tool: {block}")


def images(client: anthropic.Anthropic) -> None:
    """A picture, for the model with a vision tower. Its weights are random, so its words mean nothing."""
    data = picture().partition(",")[2]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    asked: Any = [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]
    message = client.messages.create(model=IMAGES, messages=asked, max_tokens=8, thinking={"type": "disabled"})
    check(message.usage.input_tokens > 20, f"an image; {message.stop_reason}")
    message = client.messages.create(
        model=IMAGES, messages=QUESTION, max_tokens=1500, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    check(message.content[0].type == "thinking", "thinking")


def cancellation(client: anthropic.Anthropic) -> None:
    """Leaving a stream ends its request."""
    with client.messages.stream(model=TEXT, messages=QUESTION, max_tokens=500) as stream:
        next(iter(stream.text_stream))
    check(True, "a stream was left")


def main() -> None:
    """All of it."""
    with gateway() as url, anthropic.Anthropic(base_url=url, api_key="any", timeout=120) as client:
        names = [model.id for model in client.models.list()]
        check({TEXT, IMAGES} <= set(names), f"models: {', '.join(names)}")
        for part in (text, forms, images, cancellation):
            part(client)


if __name__ == "__main__":
    main()
