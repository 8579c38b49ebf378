"""Chat messages to prompt ids, by one of two protocols chosen by configuration, never by a model's name.

- `template`: the model folder's own Jinja chat template, in jinja2's immutable sandbox.
- `v4.1`: DeepSeek's V4.1 encoding, rendered by DeepSeek's own deepseek-recipe (PyPI).

Either way only special tokens that the protocol itself writes become special ids; the same spelling inside a message
is plain text.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.engine.text.errors import TemplateError, TextError
from headrace.engine.text.tokenizer import Tokenizer
from headrace.engine.text.v41_tokens import v41_special_spellings

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class ImagePart:
    """Where one image stands in a message; the images themselves travel beside the messages, in order."""


@dataclass(frozen=True)
class ChatMessage:
    """One turn. `parts` holds text and image places in reading order."""

    role: Role
    parts: tuple[str | ImagePart, ...]


@dataclass(frozen=True)
class EncodedPrompt:
    """Prompt ids with one `image_token_id` per image, not yet expanded to its span."""

    token_ids: tuple[int, ...]
    num_images: int


class ChatProtocol(Protocol):
    """Renders messages, ending where the assistant's answer begins."""

    digest_input: bytes
    """What of this protocol shapes prompts; part of the cache namespace."""

    def encode(self, messages: Sequence[ChatMessage], *, thinking: bool) -> EncodedPrompt:
        """Raises TemplateError when the messages do not fit the protocol."""
        ...


def _unused_noncharacter(texts: Sequence[str]) -> str:
    """A Unicode noncharacter that occurs in none of the texts; it marks text as a user's through a template."""
    for code in range(0xFDD0, 0xFDF0):
        if not any(chr(code) in text for text in texts):
            return chr(code)
    raise TemplateError("the messages use every Unicode noncharacter; remove U+FDD0 … U+FDEF from them")


class JinjaProtocol:
    """A model folder's own chat template (the Hugging Face convention of variables and helpers)."""

    def __init__(
        self,
        template: str,
        tokenizer: Tokenizer,
        *,
        bos_token: str = "",
        eos_token: str = "",
        image_token_id: int | None = None,
        today: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """`image_token_id` None: images are refused. Raises TemplateError if the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: today().strftime(form)
        try:
            self._template = environment.from_string(template)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self._tokenizer = tokenizer
        self._bos, self._eos = bos_token, eos_token
        self._image_token_id = image_token_id
        spellings = sorted(tokenizer.specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self.digest_input = b"template\0" + template.encode()

    def encode(self, messages: Sequence[ChatMessage], *, thinking: bool) -> EncodedPrompt:
        raw = [[part for part in message.parts if isinstance(part, str)] for message in messages]
        mark = _unused_noncharacter([text for texts in raw for text in texts])
        image = f"{mark}image{mark}"
        turns = []
        images = 0
        for message in messages:
            content = ""
            for part in message.parts:
                if isinstance(part, ImagePart):
                    if self._image_token_id is None:
                        raise TemplateError("this model takes no images")
                    images += 1
                    content += image
                else:
                    content += part
            turns.append({"role": message.role, "content": self._shield(content, mark)})
        try:
            rendered = self._template.render(
                messages=turns,
                add_generation_prompt=True,
                bos_token=self._bos,
                eos_token=self._eos,
                enable_thinking=thinking,
                thinking=thinking,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refused the messages: {error}") from error
        ids: list[int] = []
        pieces = rendered.split(image)
        for index, piece in enumerate(pieces):
            if index:
                assert self._image_token_id is not None
                ids.append(self._image_token_id)
            self._encode_rendered(piece, mark, ids)
        if len(pieces) - 1 != images:
            raise TemplateError(f"the chat template kept {len(pieces) - 1} of {images} images")
        return EncodedPrompt(tuple(ids), images)

    def _shield(self, content: str, mark: str) -> str:
        """Break every special spelling of a user's text with the mark, so that only the template's own ones match."""
        if self._special is None:
            return content
        while True:  # breaking one spelling may join nothing, but overlapping ones need another look
            shielded = self._special.sub(lambda match: match[0][0] + mark + match[0][1:], content)
            if shielded == content:
                return content
            content = shielded

    def _encode_rendered(self, text: str, mark: str, ids: list[int]) -> None:
        at = 0
        for match in self._special.finditer(text) if self._special else ():
            ids.extend(self._tokenizer.encode_plain(text[at : match.start()].replace(mark, "")))
            ids.append(self._tokenizer.specials[match[0]])
            at = match.end()
        ids.extend(self._tokenizer.encode_plain(text[at:].replace(mark, "")))


class DeepseekV41Protocol:
    """DeepSeek's V4.1 prompt encoding through deepseek-recipe."""

    digest_input = b"deepseek-v4.1"

    def __init__(self, tokenizer: Tokenizer, *, image_token_id: int | None) -> None:
        """Raises TextError when deepseek-recipe is missing or the tokenizer lacks a special token of the encoding."""
        try:
            import deepseek_recipe
        except ImportError as error:
            raise TextError("the v4.1 protocol needs the package deepseek-recipe") from error
        self._recipe = deepseek_recipe
        self._tokenizer = tokenizer
        self._image_token_id = image_token_id
        for spelling in v41_special_spellings():
            tokenizer.special_id(spelling)

    def encode(self, messages: Sequence[ChatMessage], *, thinking: bool) -> EncodedPrompt:
        recipe = self._recipe
        texts = [part for message in messages for part in message.parts if isinstance(part, str)]
        image = f"<{_unused_noncharacter(texts)}>"
        turns = []
        images = 0
        for message in messages:
            content = "".join(image if isinstance(part, ImagePart) else part for part in message.parts)
            count = sum(isinstance(part, ImagePart) for part in message.parts)
            images += count
            # The bytes never matter here: only the places of the images do.
            sources = [recipe.BytesImageSource(b"image")] * count
            if message.role == "assistant":
                if count:
                    raise TemplateError("an assistant message may not hold an image")
                turns.append(recipe.AssistantMessage(content))
            elif message.role == "tool":
                turns.append(recipe.ToolMessage(content, image_sources=sources, image_token=image))
            elif message.role == "system":
                turns.append(recipe.SystemMessage(content, sources, image_token=image))
            else:
                turns.append(recipe.UserMessage(content, sources, image_token=image))
        if images and self._image_token_id is None:
            raise TemplateError("this model takes no images")
        encoding = recipe.DeepseekV41Encoding().with_special_tokens(recipe.SpecialTokens(image=image))
        try:
            rendered = encoding.render_conversation(recipe.Conversation(turns, thinking_mode=thinking))
        except (ValueError, RuntimeError) as error:
            raise TemplateError(f"the v4.1 encoding refused the messages: {error}") from error
        ids: list[int] = []
        at = placed = 0
        for start, end in rendered.special_ranges:
            ids.extend(self._tokenizer.encode_plain(rendered.prompt[at:start]))
            spelling = rendered.prompt[start:end]
            if spelling == image:
                assert self._image_token_id is not None
                ids.append(self._image_token_id)
                placed += 1
            else:
                ids.append(self._tokenizer.special_id(spelling))
            at = end
        ids.extend(self._tokenizer.encode_plain(rendered.prompt[at:]))
        if placed != images:
            raise TemplateError(f"the v4.1 encoding kept {placed} of {images} images")
        return EncodedPrompt(tuple(ids), images)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
