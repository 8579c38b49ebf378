"""One line of a file of requests: a JSON object that becomes the same message that a client would send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from headrace.v1 import common_pb2, inference_pb2

SAMPLING: Final = tuple(
    field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields if field.name != "logit_bias"
)
STOP: Final = tuple(field.name for field in common_pb2.StopParams.DESCRIPTOR.fields)
PROMPTS: Final = ("text", "chat", "token_ids")
_OTHERS: Final = ("id", "images", "logit_bias", "thinking")
_ROLES: Final = {
    "system": inference_pb2.CHAT_ROLE_SYSTEM,
    "user": inference_pb2.CHAT_ROLE_USER,
    "assistant": inference_pb2.CHAT_ROLE_ASSISTANT,
    "tool": inference_pb2.CHAT_ROLE_TOOL,
}


class LineError(ValueError):
    """The line is no request; the message names the key."""


def parse_line(line: str, folder: Path) -> tuple[str | int | None, inference_pb2.GenerateRequest]:
    """(its own id, the request). Image paths are relative to `folder`. Raises LineError."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise LineError(f"no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise LineError("a line holds one JSON object")
    known = {*PROMPTS, *_OTHERS, *SAMPLING, *STOP}
    if unknown := sorted(set(entry) - known):
        raise LineError(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
    identifier = entry.get("id")
    if not isinstance(identifier, str | int | None):
        raise LineError("id must be a string or a number")
    try:
        return identifier, inference_pb2.GenerateRequest(
            prompt=_prompt(entry, folder),
            sampling=common_pb2.SamplingParams(
                **{name: entry[name] for name in SAMPLING if name in entry},
                logit_bias=[
                    common_pb2.LogitBias(token_id=int(token), bias=bias)
                    for token, bias in entry.get("logit_bias", {}).items()
                ],
            ),
            stop=common_pb2.StopParams(**{name: entry[name] for name in STOP if name in entry}),
        )
    except LineError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise LineError(f"a value does not fit its key: {error}") from None


def _prompt(entry: dict[str, Any], folder: Path) -> inference_pb2.Prompt:
    given = [name for name in PROMPTS if name in entry]
    if len(given) != 1:
        raise LineError(f"give exactly one of {', '.join(PROMPTS)}")
    if given == ["chat"] and entry.get("images"):
        raise LineError('images of a chat stand in its content, as {"image": PATH}')
    images = [_image(path, folder) for path in entry.get("images", [])]
    if given == ["text"]:
        return inference_pb2.Prompt(text=inference_pb2.TextPrompt(text=entry["text"], images=images))
    if given == ["token_ids"]:
        return inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=entry["token_ids"], images=images))
    messages = [_message(turn, folder) for turn in entry["chat"]]
    return inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=messages, thinking=entry.get("thinking")))


def _message(turn: Any, folder: Path) -> inference_pb2.ChatMessage:
    if not isinstance(turn, dict) or set(turn) != {"role", "content"} or turn["role"] not in _ROLES:
        raise LineError(f"a turn of chat has role ({', '.join(_ROLES)}) and content")
    content = turn["content"]
    parts = [{"text": content}] if isinstance(content, str) else content
    wire = []
    for part in parts:
        if not isinstance(part, dict) or len(part) != 1 or not part.keys() <= {"text", "image"}:
            raise LineError('content is a text, or a list of {"text": …} and {"image": PATH}')
        if "text" in part:
            wire.append(inference_pb2.ContentPart(text=part["text"]))
        else:
            wire.append(inference_pb2.ContentPart(image=_image(part["image"], folder)))
    return inference_pb2.ChatMessage(role=_ROLES[turn["role"]], content=wire)


def _image(path: Any, folder: Path) -> inference_pb2.Image:
    if not isinstance(path, str):
        raise LineError("an image is a path")
    try:
        return inference_pb2.Image(data=(folder / path).read_bytes())
    except OSError as error:
        raise LineError(f"image {path}: {error.strerror}") from None
