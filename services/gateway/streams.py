"""A call's answer: tokens from the router through deepseek-recipe's parser to the API's events, choice by choice."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

import deepseek_recipe as recipe

from headrace.services.gateway.calls import Call
from headrace.services.gateway.hermes import CallReader, Piece
from headrace.services.gateway.text_tokens import TextTokens, logprob_of
from headrace.services.runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    Internal,
    from_proto,
)
from headrace.v1 import common_pb2, inference_pb2

_IMAGE: Final = re.compile(r"(?:prompt\.tokens\.)?images\[(\d+)\]")
"""As the router refuses one, and as an encoder does."""
Event = Any
"""deepseek-recipe's chunk or event of the call's API; it has to_json()."""
Wire = AsyncGenerator[inference_pb2.GenerateResponse, None]
Answers = AsyncGenerator[tuple[int, list[Event]] | common_pb2.Usage, None]
"""(choice, new events), and the usage last."""


class ChoiceStream:
    """One choice. deepseek-recipe ends it at a stop string by itself, a moment before the router's end comes."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._processor = recipe.StreamProcessor(call.generator(), call.parsing(), call.served.recipe_tokenizer)
        self._reader = CallReader(call.tools, in_call=call.in_call, either=call.either) if call.as_text else None
        self._tokens: TextTokens | None = None
        """Of an answer that is read as text and has logprobs."""
        if call.as_text and call.request.sampling.HasField("logprobs"):
            self._tokens = TextTokens(call.served.assets.tokenizer, call.eos)
        self.ended = False
        """The router has said how it ended."""

    def begin(self, prompt_tokens: int, fingerprint: str) -> list[Event]:
        usage = recipe.PromptUsage(prompt_tokens=prompt_tokens)
        return self._push(recipe.InferenceChunk.ready(prompt_usage=usage, system_fingerprint=fingerprint or None))

    def take(self, tokens: common_pb2.TokensEvent) -> list[Event]:
        """New tokens. Those that end a sequence are no text in any API."""
        if self._reader is not None:
            if self._tokens is not None:
                self._tokens.add(tokens)
            return self._tell(self._reader.feed(tokens.text))
        kept = [index for index, token in enumerate(tokens.token_ids) if token not in self._call.eos]
        if not kept:
            return []
        ids = [tokens.token_ids[index] for index in kept]
        logprobs = [logprob_of(tokens.logprobs[index]) for index in kept] if tokens.logprobs else None
        return self._push(recipe.InferenceChunk.tokens(ids, logprobs))

    def end(self, finished: common_pb2.FinishedEvent) -> list[Event]:
        """How it ended. Raises what ended it early."""
        self.ended = True
        raise_if_failed(finished)
        events: list[Event] = []
        if self._reader is not None:
            events += self._tell(self._reader.finish())
            if finished.stop_string in self._call.stops:  # which the router's text does not have
                events += self._push_text(finished.stop_string)
        reasons = recipe.InferenceFinishReason
        length = finished.reason == common_pb2.FINISH_REASON_LENGTH
        events += self._push(recipe.InferenceChunk.finish(reasons.Length if length else reasons.Stop))
        if not self._processor.finished:
            events += self._processor.finish()
        return events

    def _tell(self, pieces: Sequence[Piece]) -> list[Event]:
        if self._tokens is None:
            return self._push_text("".join(piece.text for piece in pieces))
        return [event for piece in pieces for chunk in self._tokens.chunks(piece) for event in self._push(chunk)]

    def _push_text(self, text: str) -> list[Event]:
        return self._push(recipe.InferenceChunk.text(text)) if text else []

    def _push(self, chunk: recipe.InferenceChunk) -> list[Event]:
        return [] if self._processor.finished else list(self._processor.push(chunk))


def raise_if_failed(finished: common_pb2.FinishedEvent) -> None:
    """Raises what ended a choice other than its own end."""
    if finished.reason == common_pb2.FINISH_REASON_ERROR:
        raise from_proto(finished.error)
    if finished.reason == common_pb2.FINISH_REASON_DEADLINE:
        raise DeadlineExceeded("the deadline passed while tokens came; allow more time or ask for fewer")
    if finished.reason == common_pb2.FINISH_REASON_CANCELLED:
        raise Cancelled("the request was cancelled")


async def named(call: Call, wire: Wire) -> Wire:
    """A call's events; what is refused of its images and of the language of its tools is told in the client's words."""
    async with aclosing(wire):
        try:
            async for event in wire:
                yield event
        except HeadraceError as error:
            image = _IMAGE.match(error.field)
            if image is not None and int(image[1]) < len(call.images):
                error.field = call.images[int(image[1])]
            told = error if call.held is None else call.held.named(error)
            if told is error:
                raise
            raise told from error


async def answers(call: Call, wire: Wire) -> Answers:
    """A call's answer. Raises typed errors, in the middle, too.

    The first item comes with the first token: until then a failure is a status.
    """
    choices = [ChoiceStream(call) for _ in range(call.n)]
    async with aclosing(wire):
        async for event in wire:
            match event.WhichOneof("event"):
                case "started":
                    fingerprint = call.served.fingerprint()
                    for index, choice in enumerate(choices):
                        yield index, choice.begin(event.started.prompt_tokens, fingerprint)
                case "tokens":
                    events = _choice(choices, event.tokens.choice).take(event.tokens)
                    if events:
                        yield event.tokens.choice, events
                case "finished":
                    yield event.finished.choice, _choice(choices, event.finished.choice).end(event.finished)
                case "usage":
                    if not all(choice.ended for choice in choices):
                        raise Internal("the router told the usage of a request that has not ended; repeat it")
                    yield event.usage
                    return
    raise Internal("the router's stream ended before the request did; repeat it")


async def gather(items: Answers, into: Sequence[Any]) -> common_pb2.Usage:
    """Put each choice's events into its response of deepseek-recipe; the usage. Raises Internal without one."""
    async with aclosing(items):
        async for item in items:
            if isinstance(item, common_pb2.Usage):
                return item
            index, events = item
            for event in events:
                into[index].accumulate(event)
    raise Internal("the answer came without its usage; repeat the request")


def _choice(choices: list[ChoiceStream], index: int) -> ChoiceStream:
    if index >= len(choices):
        raise Internal(f"the router sent choice {index} of {len(choices)}; repeat the request")
    return choices[index]
