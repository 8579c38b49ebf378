"""A router whose model does whatever llmprobe asks of one, so that only the gateway is left to be judged.

It answers from the prompt's tokens alone: what the gateway drops on the way, it cannot know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from headrace.v1 import common_pb2, inference_pb2
from tests.services.gateway.fakes import TOKENIZER, Events, finished_event, ids_event

BLOCK = 512
"""Tokens, which are bytes, of what is cached as one."""
LONG = "The sea is wide, and the sea is deep. " * 40
THOUGHT = ("One step ", "after the other.", "</think>")
DSML = "｜DSML｜"
Answer = str | Callable[[re.Match[str]], str]
ANSWERS: tuple[tuple[str, Answer], ...] = (
    (r"reply with exactly the word \"(\w+)\" and nothing else", lambda found: found[1]),
    (r"Say exactly: (.+)", lambda found: found[1]),
    (r"Repeat this text exactly, nothing else: (.+)", lambda found: found[1]),
    (r"[Mm]y name is (\w+)(?s:.*)What is my name\?", lambda found: found[1]),
    (r"What is my name\?", "I was not told."),
    (r"long essay|Count from 1 to 100|at length", LONG),
    (r"Say hello", "Hello"),
    (r"Say hi", "Hi"),
    (r"Count from 1 to 5", "1, 2, 3, 4, 5"),
    (r"capital of France(?s:.*)is Par$", "is."),
    (r"capital of France", "Paris"),
    (r"just the number(?s:.*)What is 12 \+ 30", "42"),
    (r"17 \* 3\b", "51"),
    (r"17 \* 23\b", "391"),
    (r"Add 3 to your last answer", "7"),
    (r"keys \"name\"(?s:.*)\"age\"", '{"name": "Ada", "age": 36}'),
    (r"<tool_res", "18 degrees and rain"),
    (r"Describe this image", "Red"),
)
"""What the prompt holds → the answer."""
CALLS: tuple[tuple[str, dict[str, dict[str, Any]]], ...] = (
    (r"weather AND the current time in (\w+)", {"get_weather": {"city": "$"}, "get_time": {"city": "$"}}),
    (r"weather in (\w+)", {"get_weather": {"city": "$"}}),
    (r"Book a table at ([\w ]+) for", {"book_table": {"restaurant": "$", "party_size": 4, "outdoor": True}}),
    (r"content exactly:\n([^\n｜]+(?<!<))", {"write_file": {"path": "notes.md", "content": "$"}}),
)
"""What the prompt holds → the calls, with its words for $."""


@dataclass
class Oracle:
    """A script of fakes.FakeRouter."""

    drawn: int = 0
    """How many answers were drawn by chance; each is another one."""
    seen: list[tuple[int, ...]] = field(default_factory=list)
    """Prompts."""

    async def __call__(self, request: inference_pb2.GenerateRequest) -> Events:
        prompt = tuple(request.prompt.tokens.token_ids)
        cached = max((_shared(prompt, one) for one in self.seen), default=0) // BLOCK * BLOCK
        self.seen.append(prompt)
        text = TOKENIZER.decode(prompt, skip_special=False)
        yield inference_pb2.GenerateResponse(started=inference_pb2.StartedEvent(prompt_tokens=len(prompt)))
        made = 0
        for choice in range(request.sampling.n or 1):
            for event in _events(request, choice, *self._said(request, text)):
                made += len(event.tokens.token_ids)
                yield event
        usage = common_pb2.Usage(prompt_tokens=len(prompt), cached_tokens=cached, computed_tokens=len(prompt) - cached)
        usage.completion_tokens = made
        yield inference_pb2.GenerateResponse(usage=usage)

    def _said(self, request: inference_pb2.GenerateRequest, prompt: str) -> tuple[list[list[int]], str]:
        """Pieces of thoughts and markup, and the text behind them."""
        held = request.constraint.structural_tag
        if prompt.endswith(f"<{DSML} calls>\n"):
            calls = list(_calls(prompt))[: None if '"plus"' in held else 1]
            pieces = [piece for call in calls for piece in _dsml(*call)]
            return [*pieces, TOKENIZER.encode_trusted(f"</{DSML} calls>")], ""
        thought = [TOKENIZER.encode_trusted(piece) for piece in THOUGHT] if prompt.endswith("<think>") else []
        language = request.constraint.WhichOneof("language")
        if prompt.endswith("<tool_call>\n"):
            bodies = [json.dumps({"name": name, "arguments": given}) for name, given in _calls(prompt)]
            several = '"star"' in held
            return [], "\n</tool_call>\n<tool_call>\n".join(bodies) + "\n</tool_call>" if several else bodies[0]
        if language == "json_schema":
            return thought, json.dumps(_instance(json.loads(request.constraint.json_schema)))
        sampling = request.sampling
        greedy = sampling.temperature == 0 or sampling.top_k == 1 or 0 < sampling.top_p < 0.01
        if "band name" in prompt:
            fixed = greedy or sampling.HasField("seed")
            self.drawn += not fixed
            return thought, "Quiet Rivers" if fixed else f"Quiet Rivers {self.drawn}"
        return thought, _text(prompt)


def _events(
    request: inference_pb2.GenerateRequest, choice: int, markup: list[list[int]], text: str
) -> Iterator[inference_pb2.GenerateResponse]:
    """A choice up to a stop string, whose tokens come without text, or up to the most tokens that are allowed."""
    top = request.sampling.logprobs if request.sampling.HasField("logprobs") else None
    stop = min((one for one in request.stop.stop if one in text), key=text.find, default="")
    text = text.partition(stop)[0] if stop else text
    pieces = [(ids, "") for ids in markup]
    pieces += [(TOKENIZER.encode_plain(piece), piece) for piece in re.findall(r"\s*\S+|\s+", text)]
    pieces += [(TOKENIZER.encode_plain(stop), "")] if stop else []
    left = request.stop.max_tokens or sum(len(ids) for ids, _ in pieces)
    for ids, piece in pieces:
        if len(ids) > left:
            if left:
                yield ids_event(ids[:left], piece.encode()[:left].decode(errors="ignore"), choice, top=top)
            yield finished_event(choice, common_pb2.FINISH_REASON_LENGTH)
            return
        left -= len(ids)
        yield ids_event(ids, piece, choice, top=top)
    yield finished_event(choice, **({"stop_string": stop} if stop else {}))


def _text(prompt: str) -> str:
    for pattern, answer in ANSWERS:
        if found := re.search(pattern, prompt):
            return answer if isinstance(answer, str) else answer(found).partition("<｜")[0].strip()
    return "I see."


def _calls(prompt: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for pattern, calls in CALLS:
        if found := re.search(pattern, prompt):
            for name, given in calls.items():
                yield name, {key: found[1] if value == "$" else value for key, value in given.items()}
            return


def _dsml(name: str, given: dict[str, Any]) -> Iterator[list[int]]:
    """A call; what it spells of special tokens is text."""
    yield TOKENIZER.encode_trusted(f'<{DSML} invoke name="{name}">\n')
    for key, value in given.items():
        is_text = isinstance(value, str)
        yield TOKENIZER.encode_trusted(f'<{DSML} parameter name="{key}" string="{json.dumps(is_text)}">')
        yield TOKENIZER.encode_plain(value if is_text else json.dumps(value))
        yield TOKENIZER.encode_trusted(f"</{DSML} parameter>\n")
    yield TOKENIZER.encode_trusted(f"</{DSML} invoke>\n")


def _instance(schema: dict[str, Any]) -> Any:
    """Something valid."""
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            return {name: _instance(schema["properties"][name]) for name in schema["required"]}
        case "integer":
            return 36
        case _:
            return "Ada"


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
