"""The prompts: each as a client sends it and as the tokens it must become."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import PIL.Image

from bench.parity_harness.texts import KEEPER, STORY, logbook
from headrace.engine.text.assets import TextAssets
from headrace.engine.text.chat import ChatMessage, ImagePart, Role
from headrace.v1 import inference_pb2

_WIRE_ROLES = {
    "system": inference_pb2.CHAT_ROLE_SYSTEM,
    "user": inference_pb2.CHAT_ROLE_USER,
    "assistant": inference_pb2.CHAT_ROLE_ASSISTANT,
}


@dataclass(frozen=True)
class Case:
    """One prompt. `token_ids` has one placeholder per image."""

    name: str
    wire: inference_pb2.Prompt
    """As the client sends it: text, chat or ids."""
    token_ids: tuple[int, ...]
    """What it must become, by the folder's own tokenizer and template."""
    max_tokens: int
    seed: int
    """Of the sampled answers."""
    text: str | None = None
    """Set where the prompt is plain text, so that another tokenizer can be compared too."""
    images: tuple[bytes, ...] = ()
    stop: tuple[str, ...] = ()


class CaseList:
    """Builds cases for one model folder."""

    def __init__(self, assets: TextAssets) -> None:
        self._assets = assets
        self.cases: list[Case] = []

    def text(self, name: str, text: str, max_tokens: int, stop: tuple[str, ...] = ()) -> None:
        """Sent as text, special tokens recognised."""
        ids = tuple(self._assets.tokenizer.encode_trusted(text))
        wire = inference_pb2.Prompt(text=inference_pb2.TextPrompt(text=text))
        self._add(name, wire, ids, max_tokens, text=text, stop=stop)

    def exact(self, name: str, text: str, length: int, max_tokens: int) -> None:
        """Sent as the first `length` tokens of a text."""
        ids = tuple(self._assets.tokenizer.encode_trusted(text)[:length])
        if len(ids) != length:
            raise ValueError(f"case {name}: the text has {len(ids)} tokens, {length} are wanted")
        wire = inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=ids))
        self._add(name, wire, ids, max_tokens)

    def chat(
        self, name: str, turns: Sequence[tuple[Role, str | Sequence[str | bytes]]], max_tokens: int,
        stop: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Sent as a conversation; a turn is text, or parts of which bytes are images."""
        assert self._assets.chat is not None
        messages, wire_messages, images = [], [], []
        for role, content in turns:
            parts = [content] if isinstance(content, str) else list(content)
            images += [part for part in parts if isinstance(part, bytes)]
            messages.append(ChatMessage(role, tuple(part if isinstance(part, str) else ImagePart() for part in parts)))
            wire_messages.append(
                inference_pb2.ChatMessage(role=_WIRE_ROLES[role], content=[_wire_part(part) for part in parts])
            )
        ids = self._assets.chat.encode(messages, thinking=False).token_ids
        wire = inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=wire_messages))
        self._add(name, wire, ids, max_tokens, images=tuple(images), stop=stop)

    def _add(
        self, name: str, wire: inference_pb2.Prompt, ids: tuple[int, ...], max_tokens: int, *,
        text: str | None = None, images: tuple[bytes, ...] = (), stop: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        seed = 1_000_003 * (len(self.cases) + 1)
        self.cases.append(Case(name, wire, ids, max_tokens, seed, text, images, stop))


def smollm2_cases(assets: TextAssets) -> list[Case]:
    """24 prompts: short ones, shared prefixes, stop strings, block edges, two of 3,000 tokens."""
    add = CaseList(assets)
    add.text("short/france", "The capital of France is", 16)
    add.text("short/story", "Once upon a time, in a village by a river,", 24)
    add.text("short/code", "def fibonacci(n):\n    if n < 2:\n        return n\n", 24)
    add.text("short/list", "Three things to pack for a week in the mountains:\n1.", 24)
    add.text("short/unicode", "Zoë said “naïve café” — 你好, and then", 16)
    add.exact("short/one-token", "Water runs downhill.", 1, 16)
    for name, question in (
        ("water", "Why does water boil at a lower temperature on a mountain?"),
        ("rhyme", "Write two lines that rhyme about a mill."),
        ("sum", "What is 17 + 25? Answer with the number only."),
    ):
        add.chat(f"chat/{name}", [("user", question)], 16)
    for name, question in (
        ("price", "How much is half a sack of flour?"),
        ("cat", "What is the name of the cat?"),
        ("gate", "What happens when the gate is raised by three hands?"),
        ("open", "Will you be open tomorrow?"),
    ):
        add.chat(f"shared/{name}", [("system", KEEPER), ("user", question)], 16)
    add.chat(
        "shared/second-turn",
        [("system", KEEPER), ("user", "What is the name of the cat?"), ("assistant", "The cat has no name."),
         ("user", "And how far is the town?")],
        16,
    )  # fmt: skip
    add.text("stop/sentence", STORY, 24, stop=(".",))
    add.text("stop/newline", "Question: Which river runs through Paris?\nAnswer:", 24, stop=("\n", "Question"))
    add.text("stop/long", "one, two, three, four, five, six,", 24, stop=(" nine, ten", "never said"))
    add.chat("stop/never", [("user", "Count from 1 to 5.")], 16, stop=("no such string",))
    add.exact("edge/127", logbook(6), 127, 16)
    add.exact("edge/128", logbook(6), 128, 16)
    add.exact("edge/129", logbook(6), 129, 16)
    add.exact("edge/256", logbook(12, seed=3), 256, 16)
    add.exact("long/3000", logbook(120, seed=1), 3000, 12)
    add.text("long/shared", logbook(64, seed=1) + "\nQuestion: how was the weather on day 101?\nAnswer: it was", 12)
    return add.cases


def v41_cases(assets: TextAssets) -> list[Case]:
    """Text of several lengths around block and window edges, shared prefixes, one and two images."""
    add = CaseList(assets)
    red, stripes = picture(40, 30, 0), picture(25, 60, 1)
    add.text("v41/short", "Water", 24)
    add.chat("v41/chat", [("user", "Which way to the mill?")], 24)
    add.exact("v41/block", logbook(2), 128, 16)
    add.exact("v41/long", logbook(6), 500, 24)
    add.text("v41/stop", logbook(3), 24, stop=("e", "\n"))
    add.chat("v41/image", [("user", ["What is on ", red, " this picture?"])], 24)
    add.chat("v41/images", [("user", [logbook(1), red, " and ", stripes, " differ in"])], 24)
    add.chat("v41/image-again", [("user", ["What is on ", red, " this picture, in one word?"])], 24)
    return add.cases


def picture(width: int, height: int, kind: int) -> bytes:
    """A PNG made in code: a sloping gradient (0) or stripes (1)."""
    image = PIL.Image.new("RGB", (width, height))
    for x in range(width):
        for y in range(height):
            stripe = 255 * ((x // 5 + y // 7) % 2)
            image.putpixel((x, y), (200, x * 6 % 256, y * 6 % 256) if kind == 0 else (stripe, 60, 255 - stripe))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _wire_part(part: str | bytes) -> inference_pb2.ContentPart:
    if isinstance(part, str):
        return inference_pb2.ContentPart(text=part)
    return inference_pb2.ContentPart(image=inference_pb2.Image(data=part))
