"""Responses with the official `openai` client: text, streams, a schema, tools, images, logprobs, stored responses,
leaving.

.venv/bin/python examples/responses.py
"""

from __future__ import annotations

import json
from typing import Any

import openai
from gateway import IMAGES, PARAMETERS, SCHEMA, STORY, TEXT, Gateway, check, gateway, picture

QUESTION = "What is the capital of France?"


def text(client: openai.OpenAI) -> None:
    """An answer at once, and as a stream."""
    response = client.responses.create(model=TEXT, input=QUESTION, temperature=0, max_output_tokens=32)
    check("Paris" in response.output_text, f"an answer: {response.output_text!r}")
    with client.responses.stream(model=TEXT, input=QUESTION, temperature=0, max_output_tokens=32) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    check("".join(pieces) == response.output_text, f"the same as a stream of {len(pieces)} pieces")
    check(final.usage is not None and final.usage.output_tokens > 0, "its usage")


def stored(client: openai.OpenAI) -> None:
    """A conversation whose earlier part the gateway keeps."""
    first = client.responses.create(model=TEXT, input=QUESTION, temperature=0, max_output_tokens=32)
    second = client.responses.create(
        model=TEXT, input="And of Germany?", previous_response_id=first.id, temperature=0, max_output_tokens=32
    )
    check(second.previous_response_id == first.id, f"it goes on: {second.output_text!r}")
    cached = second.usage.input_tokens_details.cached_tokens if second.usage else 0
    print(f"  {cached} of its prompt's tokens were cached")
    check(client.responses.retrieve(first.id).output_text == first.output_text, "it can be read again")
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except openai.NotFoundError:
        check(True, "and be forgotten")


def forms(client: openai.OpenAI) -> None:
    """An answer in the form of a schema."""
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    response = client.responses.create(model=TEXT, input=QUESTION, text=form, temperature=0, max_output_tokens=64)
    document = json.loads(response.output_text)
    check(set(document) == {"city", "country"}, f"a schema: {document}")


def tools(client: openai.OpenAI) -> None:
    """A tool that has to be called, and an answer from its result."""
    tool: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    common: Any = {"model": TEXT, "tools": [tool], "temperature": 0, "max_output_tokens": 64}
    asked = "What is the weather in Paris?"
    response = client.responses.create(input=asked, tool_choice="required", parallel_tool_calls=False, **common)
    call = next(item for item in response.output if item.type == "function_call")
    check("city" in json.loads(call.arguments), f"a tool: {call.name}({call.arguments})")
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "18 °C, rain"}]
    response = client.responses.create(input=result, previous_response_id=response.id, tool_choice="none", **common)
    check(bool(response.output_text), f"its result read: {response.output_text!r}")


def logprobs(client: openai.OpenAI) -> None:
    """Log-probabilities of the text's tokens."""
    response = client.responses.create(
        model=TEXT, input=QUESTION, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4
    )
    part: Any = next(item for item in response.output if item.type == "message").content[0]
    check(len(part.logprobs[0].top_logprobs) == 2, f"logprobs of {[one.token for one in part.logprobs]}")


def images(client: openai.OpenAI) -> None:
    """A picture, for the model with a vision tower. Its weights are random, so its words mean nothing."""
    words = {"type": "input_text", "text": "What is this?"}
    image = {"type": "input_image", "image_url": picture(), "detail": "auto"}
    asked: Any = [[{"role": "user", "content": content}] for content in ([words], [words, image])]
    usages = [client.responses.create(model=IMAGES, input=one, max_output_tokens=8).usage for one in asked]
    without, with_image = (usage.input_tokens if usage else 0 for usage in usages)
    check(with_image - without > 1, f"an image of {with_image - without} tokens")


def cancellation(client: openai.OpenAI, front: Gateway) -> None:
    """Leaving a stream ends its request."""
    with front.cancels():
        stream = client.responses.create(model=TEXT, input=STORY, stream=True, max_output_tokens=1000)
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        stream.close()


def main() -> None:
    """All of it."""
    with gateway() as front, openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", timeout=120) as client:
        names = [model.id for model in client.models.list()]
        check({TEXT, IMAGES} <= set(names), f"models: {', '.join(names)}")
        for part in (text, stored, forms, tools, logprobs, images):
            part(client)
        cancellation(client, front)


if __name__ == "__main__":
    main()
