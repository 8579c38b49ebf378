"""A converted conversation as the model's prompt, by one of two protocols that the configuration names.

Conversion is deepseek-recipe's for both, so that the APIs' messages are read in one way. `v4.1` then renders as
DeepSeek does; `template` renders the folder's own chat template, with tools as text in the Hermes form (hermes.py).
Only special tokens that the protocol itself writes become special ids.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import deepseek_recipe as recipe

from headrace.engine.text.assets import TextAssets
from headrace.engine.text.chat import ChatMessage, ImagePart, Role
from headrace.engine.text.errors import TextError
from headrace.engine.text.tokenizer import Tokenizer
from headrace.services.gateway import hermes
from headrace.services.runtime.errors import InvalidArgument, Unimplemented
from headrace.v1 import inference_pb2

_ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "latest_reminder": "system",
}


@dataclass(frozen=True)
class Rendered:
    """A prompt with one placeholder id for each image."""

    token_ids: tuple[int, ...]
    images: tuple[recipe.ImageSource, ...]
    in_call: bool = False
    """The prompt ends inside a tool call that the model has to complete (`template`)."""
    points: tuple[int, ...] = ()
    """Tokens before the end of each marked text that stands before the first image (`v4.1`)."""
    system_end: int = 0
    """Tokens before the first turn of the user, tools included (`v4.1`)."""


def unused_marks(body: Any) -> tuple[str, str]:
    """Two noncharacters that no text of the body has. They go through deepseek-recipe for images, and for the ends of
    marked prefixes."""
    text = json.dumps(body, ensure_ascii=False)
    unused = [chr(code) for code in range(0xFDD0, 0xFDF0) if chr(code) not in text]
    if len(unused) < 2:
        raise InvalidArgument("the request uses every Unicode noncharacter; remove U+FDD0 … U+FDEF from it")
    return unused[0], unused[1]


def refuse_too_long(texts: Iterable[str], tokenizer: Tokenizer, most: int) -> None:
    """Raises InvalidArgument for texts that are more than `most` tokens however they are read (0: as many as there
    are), before the tokenizer spends seconds on them in which this process serves nobody else (L12)."""
    size = sum(len(text.encode()) for text in texts)
    least = size // tokenizer.longest_token
    if most and least > most:
        message = f"{size} bytes are at least {least} tokens; the model takes at most {most}"
        raise InvalidArgument(message, field="prompt.tokens")


def special_tokens(mark: str) -> recipe.SpecialTokens:
    """DeepSeek's spellings, but for the image's."""
    return recipe.SpecialTokens(image=mark)


def render_v41(conversation: recipe.Conversation, assets: TextAssets, mark: str, point: str, most: int) -> Rendered:
    """DeepSeek's encoding; each `point` in it becomes one of the prompt's. Raises InvalidArgument for what it
    refuses, and beyond `most` tokens."""
    encoding = recipe.DeepseekV41Encoding().with_special_tokens(special_tokens(mark))
    try:
        rendered = encoding.render_conversation(conversation)
    except (ValueError, RuntimeError) as error:
        raise InvalidArgument(f"the v4.1 encoding refused the messages: {error}", field="messages") from error
    refuse_too_long([rendered.prompt], assets.tokenizer, most)
    ids: list[int] = []
    points: list[int] = []
    system_end = 0
    images = False

    def take(text: str) -> None:
        before, found, rest = text.partition(point)
        while found and not images:  # an image's length is the router's to know
            points.append(len(ids) + len(assets.tokenizer.encode_plain(before)))
            more, found, rest = rest.partition(point)
            before += more
        ids.extend(assets.tokenizer.encode_plain(text.replace(point, "")))

    at = 0
    user = recipe.SpecialToken.User.default_str()
    for start, end in rendered.special_ranges:
        take(rendered.prompt[at:start])
        spelling = rendered.prompt[start:end]
        if spelling == user and not system_end:
            system_end = len(ids)
        if spelling == mark:
            ids.append(_image_id(assets))
            images = True
        else:
            ids.append(assets.tokenizer.special_id(spelling))
        at = end
    take(rendered.prompt[at:])
    return Rendered(tuple(ids), tuple(rendered.image_sources), points=tuple(points), system_end=system_end)


def render_template(conversation: recipe.Conversation, assets: TextAssets, mark: str, most: int) -> Rendered:
    """The folder's chat template. Raises InvalidArgument for what it refuses, and beyond `most` tokens."""
    if assets.chat is None:
        raise InvalidArgument("this model has no chat template; use /v1/completions", field="messages")
    offered = () if conversation.tool_choice == "none" else tuple(conversation.tools)
    messages = list(conversation.messages)
    prefix = ""
    if messages and messages[-1].prefix:
        prefix = messages.pop().content
    turns = [_turn(message, mark) for message in messages]
    if offered:
        turns = _with_tools(turns, hermes.preamble(offered))
    parts = (part for turn in turns for part in turn.parts if isinstance(part, str))
    refuse_too_long([*parts, prefix], assets.tokenizer, most)
    images = tuple(source for message in messages for source in message.image_sources)
    if images:
        _image_id(assets)
    try:
        encoded = assets.chat.encode(turns, thinking=False)
    except TextError as error:
        raise InvalidArgument(str(error), field="messages") from error
    forced = bool(offered) and conversation.tool_choice == "required"
    tail = prefix + (hermes.OPEN if forced else "")
    ids = encoded.token_ids + tuple(assets.tokenizer.encode_plain(tail) if tail else ())
    return Rendered(ids, images, forced)


def _turn(message: recipe.Message, mark: str) -> ChatMessage:
    role = _ROLES[message.role]
    pieces = message.content.split(mark, len(message.image_sources))
    parts: list[str | ImagePart] = []
    for index, piece in enumerate(pieces):
        if index:
            parts.append(ImagePart())
        if piece:
            parts.append(piece)
    if message.tool_calls:
        parts.append(hermes.calls_text(message.tool_calls))
    if role == "tool":  # few templates know the role, and all know a user
        return ChatMessage("user", (hermes.RESULT_OPEN, *parts, hermes.RESULT_CLOSE))
    return ChatMessage(role, tuple(parts))


def _with_tools(turns: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
    """The tools stand at the end of the system message, which is made where there is none."""
    if turns and turns[0].role == "system":
        return [ChatMessage("system", (*turns[0].parts, "\n\n", text)), *turns[1:]]
    return [ChatMessage("system", (text,)), *turns]


def _image_id(assets: TextAssets) -> int:
    if assets.image_token_id is None:
        raise InvalidArgument("this model takes no images", field="messages")
    return assets.image_token_id


def wire_images(sources: Sequence[recipe.ImageSource], low_detail_tokens: int) -> list[inference_pb2.Image]:
    """Bytes of data URLs; other addresses are the router's to fetch, fenced (L26). Raises InvalidArgument."""
    return [_wire_image(source, low_detail_tokens) for source in sources]


def _wire_image(source: recipe.ImageSource, low_detail_tokens: int) -> inference_pb2.Image:
    field = source.path.lstrip(".")
    if source.kind == "bytes":
        image = inference_pb2.Image(data=source.data or b"")
    else:
        image = image_of(source.data_url or source.url or "", field)
    if source.detail == "low":
        image.resize.max_image_tokens = low_detail_tokens
    return image


def image_of(url: str, field: str) -> inference_pb2.Image:
    """A picture given as a data URL, or by its address, which the router judges. Raises InvalidArgument,
    Unimplemented."""
    if url.startswith("data:"):
        return inference_pb2.Image(data=_data_of(url, field))
    if url.startswith(("https://", "http://")):
        return inference_pb2.Image(url=url)
    raise Unimplemented(field, "an image is a data URL or an http(s) address")


def _data_of(url: str, field: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise InvalidArgument("the data URL has no data", field=field)
    try:
        data = base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"the data URL is no base64: {error}", field=field) from error
    if not data:
        raise InvalidArgument("the image has no data", field=field)
    return data
