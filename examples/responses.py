"""Responses with the official `openai` client: text, streams, tools, a schema, images, logprobs, stored responses.

.venv/bin/python examples/responses.py
"""

from __future__ import annotations

import json
from typing import Any

import openai
from gateway import IMAGES, PARAMETERS, SCHEMA, TEXT, check, gateway, if_served, picture

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
    """A schema, and a tool that has to be called."""
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    response = if_served(
        "a schema",
        lambda: client.responses.create(model=TEXT, input=QUESTION, text=form, temperature=0, max_output_tokens=64),
        openai.BadRequestError,
    )
    if response is not None:
        document = json.loads(response.output_text)
        check(set(document) == {"city", "country"}, f"a schema: {document}")
    tool: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    response = if_served(
        "a tool",
        lambda: client.responses.create(
            model=TEXT, input="The weather in Paris?", tools=[tool], tool_choice="required", max_output_tokens=64
        ),
        openai.BadRequestError,
    )
    if response is not None:
        call = next(item for item in response.output if item.type == "function_call")
        check("city" in json.loads(call.arguments), f"a tool: {call.name}({call.arguments})")


def logprobs(client: openai.OpenAI) -> None:
    """Log-probabilities of the text's tokens."""
    response = client.responses.create(
        model=TEXT, input=QUESTION, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4
    )
    part: Any = next(item for item in response.output if item.type == "message").content[0]
    check(len(part.logprobs[0].top_logprobs) == 2, f"logprobs of {[one.token for one in part.logprobs]}")


def images(client: openai.OpenAI) -> None:
    """A picture, for the model with a vision tower. Its weights are random, so its words mean nothing."""
    image: Any = {"type": "input_image", "image_url": picture(), "detail": "auto"}
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, image]}]
    response = client.responses.create(model=IMAGES, input=asked, max_output_tokens=8)
    check(response.usage is not None and response.usage.input_tokens > 20, f"an image; {response.status}")


def cancellation(client: openai.OpenAI) -> None:
    """Leaving a stream ends its request."""
    stream = client.responses.create(model=TEXT, input=QUESTION, stream=True, max_output_tokens=500)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    check(True, "a stream was left")


def main() -> None:
    """All of it."""
    with gateway() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=120) as client:
        for part in (text, stored, forms, logprobs, images, cancellation):
            part(client)


if __name__ == "__main__":
    main()
