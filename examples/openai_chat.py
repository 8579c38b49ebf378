"""Chat Completions with the official `openai` client: text, streams, a schema, tools, images, choices,
logprobs, leaving.

.venv/bin/python examples/openai_chat.py
"""

from __future__ import annotations

import json
from typing import Any

import openai
from gateway import IMAGES, PARAMETERS, SCHEMA, STORY, TEXT, Gateway, check, gateway, picture

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
    """An answer in the form of a schema."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model=TEXT, messages=QUESTION, response_format=form, temperature=0, max_tokens=64
    )
    document = json.loads(answer.choices[0].message.content or "")
    check(set(document) == {"city", "country"}, f"a schema: {document}")


def tools(client: openai.OpenAI) -> None:
    """A tool that has to be called, its call as a stream, and an answer from its result."""
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    call: Any = {"model": TEXT, "messages": asked, "tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    call |= {"parallel_tool_calls": False, "max_tokens": 64}
    answer = client.chat.completions.create(**call)
    (made,) = answer.choices[0].message.tool_calls or ()
    check("city" in json.loads(made.function.arguments), f"a tool: {made.function.name}({made.function.arguments})")
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**call, stream=True)]
    pieces = [piece.function.arguments or "" for delta in deltas for piece in delta.tool_calls or ()]
    check("".join(pieces) == made.function.arguments, f"the same call as a stream of {len(pieces)} pieces")
    asked += [answer.choices[0].message, {"role": "tool", "tool_call_id": made.id, "content": "18 °C, rain"}]
    answer = client.chat.completions.create(
        model=TEXT, messages=asked, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=32
    )
    check(bool(answer.choices[0].message.content), f"its result read: {answer.choices[0].message.content!r}")


def images(client: openai.OpenAI) -> None:
    """A picture, for the model with a vision tower. Its weights are random, so its words mean nothing."""
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": picture()}}]
    asked: Any = [{"role": "user", "content": content}]
    plain: Any = [{"role": "user", "content": "What is this?"}]
    with_image = client.chat.completions.create(model=IMAGES, messages=asked, max_tokens=8).usage
    without = client.chat.completions.create(model=IMAGES, messages=plain, max_tokens=8).usage
    longer = with_image.prompt_tokens - without.prompt_tokens if with_image and without else 0
    check(longer > 1, f"an image of {longer} tokens")


def cancellation(client: openai.OpenAI, front: Gateway) -> None:
    """Leaving a stream ends its request."""
    asked: Any = [{"role": "user", "content": STORY}]
    with front.cancels():
        stream = client.chat.completions.create(model=TEXT, messages=asked, stream=True, max_tokens=1000)
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        stream.close()


def main() -> None:
    """All of it."""
    with gateway() as front, openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", timeout=120) as client:
        names = [model.id for model in client.models.list()]
        check({TEXT, IMAGES} <= set(names), f"models: {', '.join(names)}")
        for part in (text, choices, forms, tools, images):
            part(client)
        cancellation(client, front)


if __name__ == "__main__":
    main()
