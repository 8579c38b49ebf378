"""/v1/completions: text after text, without any template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.services.gateway import fields
from headrace.services.gateway import usage as usages
from headrace.services.gateway.sampling import Body, sampling_of, stops_of
from headrace.services.gateway.served import Served
from headrace.services.gateway.sse import DONE, Frames, frame
from headrace.services.gateway.streams import raise_if_failed
from headrace.services.runtime.errors import Internal, InvalidArgument, Unimplemented
from headrace.services.runtime.ids import new_request_id
from headrace.v1 import common_pb2, inference_pb2

MAX_TOKENS: Final = 16
"""What the API takes without max_tokens."""
Wire = AsyncGenerator[inference_pb2.GenerateResponse, None]


@dataclass(frozen=True)
class Completion:
    """A request that can be sent."""

    served: Served
    request: inference_pb2.GenerateRequest
    stream: bool
    id: str = field(default_factory=lambda: f"cmpl-{new_request_id()}")
    created: int = field(default_factory=lambda: int(time.time()))


def make_completion(body: Body, served: Served) -> Completion:
    """Raises InvalidArgument, Unimplemented naming the field."""
    fields.check("completions", body)
    given = {name: value for name, value in body.items() if value is not None}
    request = inference_pb2.GenerateRequest(prompt=_prompt(given["prompt"]), sampling=sampling_of(given))
    if "logprobs" in given:
        request.sampling.logprobs = int(given["logprobs"])
    request.stop.max_tokens = int(given.get("max_tokens", MAX_TOKENS))
    request.stop.stop.extend(stops_of(given))
    return Completion(served, request, bool(given.get("stream")))


def _prompt(prompt: Any) -> inference_pb2.Prompt:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return inference_pb2.Prompt(text=inference_pb2.TextPrompt(text=prompt))
    if all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        if not all(0 <= token < 2**32 for token in prompt):
            raise InvalidArgument("holds a number that is no token id", field="prompt")
        return inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=prompt))
    raise Unimplemented("prompt", "one prompt at a time; send the others as requests of their own")


@dataclass
class _Choice:
    text: str = ""
    reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)


def _take(event: common_pb2.TokensEvent, offset: int) -> _Choice:
    """What one event brings; `offset` characters came before it."""
    part = _Choice(text=event.text)
    at = offset
    for position in event.logprobs:
        token = position.chosen.text.decode("utf-8", errors="replace")
        part.tokens.append(token)
        part.token_logprobs.append(position.chosen.logprob)
        part.top_logprobs.append({one.text.decode("utf-8", errors="replace"): one.logprob for one in position.top})
        part.text_offset.append(at)
        at += len(token)
    return part


def _reason(finished: common_pb2.FinishedEvent) -> str:
    raise_if_failed(finished)
    return "length" if finished.reason == common_pb2.FINISH_REASON_LENGTH else "stop"


def _document(completion: Completion, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": completion.id,
        "object": "text_completion",
        "created": completion.created,
        "model": completion.served.name,
        "system_fingerprint": completion.served.fingerprint() or None,
        "choices": choices,
        "usage": usage,
    }


def _choice(index: int, part: _Choice, *, logprobs: bool) -> dict[str, Any]:
    told = None
    if logprobs:
        told = {
            "tokens": part.tokens,
            "token_logprobs": part.token_logprobs,
            "top_logprobs": part.top_logprobs,
            "text_offset": part.text_offset,
        }
    return {"index": index, "text": part.text, "logprobs": told, "finish_reason": part.reason}


async def frames(completion: Completion, wire: Wire, *, include_usage: bool) -> Frames:
    """The stream of chunks."""
    logprobs = completion.request.sampling.HasField("logprobs")
    offsets: dict[int, int] = {}
    async with aclosing(wire):
        async for event in wire:
            match event.WhichOneof("event"):
                case "tokens":
                    index = event.tokens.choice
                    part = _take(event.tokens, offsets.get(index, 0))
                    offsets[index] = offsets.get(index, 0) + len(part.text)
                    yield frame(_document(completion, [_choice(index, part, logprobs=logprobs)], None))
                case "finished":
                    part = _Choice(reason=_reason(event.finished))
                    yield frame(_document(completion, [_choice(event.finished.choice, part, logprobs=False)], None))
                case "usage" if include_usage:
                    yield frame(_document(completion, [], usages.of_chat(event.usage, 0)))
    yield DONE


async def whole(completion: Completion, wire: Wire) -> dict[str, Any]:
    """The completion when it is there."""
    choices = [_Choice() for _ in range(completion.request.sampling.n)]
    usage: common_pb2.Usage | None = None
    async with aclosing(wire):
        async for event in wire:
            match event.WhichOneof("event"):
                case "tokens":
                    choice = choices[event.tokens.choice]
                    part = _take(event.tokens, len(choice.text))
                    choice.text += part.text
                    choice.tokens += part.tokens
                    choice.token_logprobs += part.token_logprobs
                    choice.top_logprobs += part.top_logprobs
                    choice.text_offset += part.text_offset
                case "finished":
                    choices[event.finished.choice].reason = _reason(event.finished)
                case "usage":
                    usage = event.usage
    if usage is None or any(choice.reason is None for choice in choices):
        raise Internal("the router's stream ended before the request did; repeat it")
    logprobs = completion.request.sampling.HasField("logprobs")
    told = [_choice(index, choice, logprobs=logprobs) for index, choice in enumerate(choices)]
    return _document(completion, told, usages.of_chat(usage, 0))
