"""Chat Completions with the official `openai` client: text, streams, tools, a schema, images, choices, logprobs.

.venv/bin/python examples/openai_chat.py
"""

from __future__ import annotations

import json
from typing import Any

import openai
from gateway import IMAGES, PARAMETERS, SCHEMA, TEXT, check, gateway, if_served, picture

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city", "parameters": PARAMETERS},
}


def text(client: openai.OpenAI) -> None:
    """An answer at once, the same as a stream, and the same again by its seed."""
    answer = client.chat.completions.create(model=TEXT, messages=QUESTION, temperature=0, max_tokens=32)
    said = answer.choices[0].message.content or ""
    check("Paris" in said, f"an answer: {said!r}")
    stream = client.chat.completions.create(
        model=TEXT, messages=QUESTION, temperature=0, max_tokens=32, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    usage = chunks[-1].usage
    check(streamed == said, f"the same as a stream of {len(chunks)} chunks")
    check(
        usage is not None and usage.completion_tokens > 0,
        f"its usage: {usage.prompt_tokens} + {usage.completion_tokens}" if usage else "its usage",
    )
    drawn = [client.chat.completions.create(model=TEXT, messages=QUESTION, seed=7, max_tokens=12) for _ in range(2)]
    fingerprints = {one.system_fingerprint for one in drawn}
    check(len({one.choices[0].message.content for one in drawn}) == 1, f"one seed, one answer ({fingerprints})")


def choices(client: openai.OpenAI) -> None:
    """Two choices with the log-probabilities of their tokens."""
    answer = client.chat.completions.create(
        model=TEXT, messages=QUESTION, n=2, seed=3, logprobs=True, top_logprobs=2, max_tokens=8
    )
    check(len(answer.choices) == 2, f"n = 2: {[choice.message.content for choice in answer.choices]}")
    first = answer.choices[0].logprobs.content[0] if answer.choices[0].logprobs else None
    tops = first.top_logprobs if first and first is not None else []
    check(len(tops) == 2, f"logprobs: {[(one.token, round(one.logprob, 2)) for one in tops]}")


def forms(client: openai.OpenAI) -> None:
    """A schema, and a tool that has to be called."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    answer = if_served(
        "a schema",
        lambda: client.chat.completions.create(
            model=TEXT, messages=QUESTION, response_format=form, temperature=0, max_tokens=64
        ),
        openai.BadRequestError,
    )
    if answer is not None:
        document = json.loads(answer.choices[0].message.content or "")
        check(set(document) == {"city", "country"}, f"a schema: {document}")
    asked: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = if_served(
        "a tool",
        lambda: client.chat.completions.create(
            model=TEXT, messages=asked, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=64
        ),
        openai.BadRequestError,
    )
    if answer is not None:
        (call,) = answer.choices[0].message.tool_calls or ()
        check("city" in json.loads(call.function.arguments), f"a tool: {call.function.name}({call.function.arguments})")


def images(client: openai.OpenAI) -> None:
    """A picture, for the model with a vision tower. Its weights are random, so its words mean nothing."""
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": picture()}}]
    asked: Any = [{"role": "user", "content": content}]
    plain: Any = [{"role": "user", "content": "What is this?"}]
    with_image = client.chat.completions.create(model=IMAGES, messages=asked, max_tokens=8).usage
    without = client.chat.completions.create(model=IMAGES, messages=plain, max_tokens=8).usage
    longer = with_image.prompt_tokens - without.prompt_tokens if with_image and without else 0
    check(longer > 1, f"an image of {longer} tokens")


def cancellation(client: openai.OpenAI) -> None:
    """Leaving a stream ends its request."""
    stream = client.chat.completions.create(model=TEXT, messages=QUESTION, stream=True, max_tokens=500)
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    stream.close()
    check(True, "a stream was left")


def main() -> None:
    """All of it."""
    with gateway() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=120) as client:
        names = [model.id for model in client.models.list()]
        check({TEXT, IMAGES} <= set(names), f"models: {', '.join(names)}")
        for part in (text, choices, forms, images, cancellation):
            part(client)


if __name__ == "__main__":
    main()
