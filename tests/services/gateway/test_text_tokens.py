"""Logprobs beside tools where calls are read as text: each token of the content has one, those of calls have none."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import pytest_asyncio

from headrace.services.gateway.hermes import DELIMITER, CallReader
from headrace.services.gateway.text_tokens import TextTokens
from headrace.services.runtime.errors import Internal
from headrace.v1 import common_pb2
from tests.services.gateway.fakes import World, says, texts

HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 5}}\n</tool_call>'
TEXT = "Lét <me>."


class Words:
    """A tokenizer of a few tokens."""

    def __init__(self, *words: bytes) -> None:
        self.words = words

    def token_bytes(self, token: int) -> bytes:
        return self.words[token]

    def is_special(self, token: int) -> bool:
        return self.words[token].startswith(b"<|")


def told(words: tuple[bytes, ...], *, cut: int | None = None, step: int = 1) -> list[str | tuple[int, ...]]:
    """What deepseek-recipe is to hear: texts, and ids of tokens. `cut`: characters that a stop string left."""
    tokenizer: Any = Words(*words)
    tokens, reader = TextTokens(tokenizer, {99}), CallReader(frozenset({"f"}), in_call=False)
    text = b"".join(word for word in words if not word.startswith(b"<|")).decode(errors="replace")[:cut]
    position = common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(logprob=-1.0))
    for token in range(len(words)):
        tokens.add(common_pb2.TokensEvent(token_ids=[token], logprobs=[position]))
    pieces = [piece for at in range(0, len(text), step) for piece in reader.feed(text[at : at + step])]
    out: list[str | tuple[int, ...]] = []
    for piece in [*pieces, *reader.finish()]:
        for chunk in tokens.chunks(piece):
            assert chunk.kind in ("text", "tokens")
            out.append(chunk.content or "" if chunk.kind == "text" else tuple(chunk.token_ids or ()))
    return out


def test_tokens_of_the_text_are_told() -> None:
    """Whole ones; one that begins a call, too, or that a stop string cuts, as the text that it has of the answer."""
    call = CALL.encode()
    assert told((b"a", b" b", b"<|x|>", b"c"), step=9) == [(0, 1, 3)]
    assert told((b"a", b"\xe2\x82", b"\xac", b"c"), step=1) == [(0,), (1, 2), (3,)]
    made = told((b"so", b" <tool", call.removeprefix(b"<tool") + b" ", b"x"), step=100)
    assert made[:2] == [(0,), " "]
    assert all(isinstance(one, str) for one in made[1:])
    assert told((b"so", b" END", b"!"), cut=3, step=9) == [(0,), " "]
    assert told((b"so", b"\xe2\x82"), step=9) == [(0,), "\ufffd"]
    assert told((b"a", f"x{DELIMITER}y".encode(), b"b"), step=9) == [(0,), "xy", (2,)]


def test_logprobs_that_are_missing() -> None:
    """L13: a defect elsewhere is told."""
    tokenizer: Any = Words(b"a")
    with pytest.raises(Internal, match="without their logprobs"):
        TextTokens(tokenizer, ()).add(common_pb2.TokensEvent(token_ids=[0]))


@pytest_asyncio.fixture
async def client(world: World) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="key-1", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("answer", [TEXT, TEXT + "\n\n" + CALL, CALL, TEXT + "<tool_", CALL[:20]])
async def test_chat(world: World, client: Any, answer: str) -> None:
    """Whole and streamed, of both choices: what the tokens spell is the content."""
    world.router.script = says(*(answer[at : at + 3] for at in range(0, len(answer), 3)))
    asked: Any = {"model": "plain", "messages": HI, "tools": [TOOL], "n": 2, "logprobs": True, "top_logprobs": 2}
    for choice in (await client.chat.completions.create(**asked)).choices:
        content = choice.message.content or ""
        assert content == ("" if answer == CALL else answer.partition("\n\n" + CALL)[0])
        assert bool(choice.message.tool_calls) is (CALL in answer)
        there = choice.logprobs.content if choice.logprobs is not None else None
        spelt = b"".join(bytes(one.bytes) for one in there or ()).decode()
        assert spelt.rstrip("\n") == content
        assert all(one.logprob == -0.5 and len(one.top_logprobs) == 2 for one in there or ())
    streamed = {0: ["", b""], 1: ["", b""]}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            mine: list[Any] = streamed[choice.index]
            mine[0] += choice.delta.content or ""
            for one in (choice.logprobs.content if choice.logprobs is not None else None) or ():
                mine[1] += bytes(one.bytes)
    for text, spelt in streamed.values():
        assert text == content
        assert spelt.decode().rstrip("\n") == content
    assert world.router.requests[-1].sampling.logprobs == 2


async def test_responses(world: World, client: Any) -> None:
    world.router.script = says(*TEXT, "\n\n", *(CALL[at : at + 3] for at in range(0, len(CALL), 3)))
    asked: Any = {"model": "plain", "input": "Hi", "top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    asked["tools"] = [TOOL["function"] | {"type": "function"}]
    response = await client.responses.create(**asked)
    assert [item.type for item in response.output] == ["message", "function_call"]
    part = response.output[0].content[0]
    assert part.text == TEXT
    assert b"".join(bytes(one.bytes) for one in part.logprobs).decode().rstrip("\n") == TEXT
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert texts([event.delta for event in deltas]) == TEXT
    told_tokens = [one.token for event in deltas for one in event.logprobs]
    assert "".join(told_tokens).startswith("L\\xc3\\xa9t <me>.")
