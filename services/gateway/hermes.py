"""Tools as text for models that have a chat template of their own: the Hermes form.

The tools stand in the system message as JSON; a call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. What
the model writes in that form is handed to deepseek-recipe in its markup under a delimiter that no text can hold, so
that calls reach the clients of every API in the way of DeepSeek's own models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import deepseek_recipe as recipe

TAG: Final = "<tool_call>"
OPEN: Final = f"{TAG}\n"
CLOSE: Final = "</tool_call>"
RESULT_OPEN: Final = "<tool_response>\n"
RESULT_CLOSE: Final = "\n</tool_response>"
DELIMITER: Final = "\U0010fffe"
"""A noncharacter; what a model writes of it is removed before it is read."""
_STRING_OR_CLOSE = re.compile(rf'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|{CLOSE}', re.DOTALL)
"""Of JSON: a string, which may lack its end as yet."""
NAME: Final = re.compile(r'[^\s"\\<\x00-\x1f\x7f-\x9f\ufeff｜]+')
"""Names of parameters that deepseek-recipe reads; an ECMA-262 expression, too."""
_BLANK: Final = re.compile(r"[ \t\n\r]*")


def preamble(tools: Sequence[recipe.ToolDefinition]) -> str:
    """What tells the model of its tools."""
    lines = [
        json.dumps(
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.parameters or {"type": "object", "properties": {}},
                },
            },
            ensure_ascii=False,
        )
        for tool in tools
    ]
    return (
        "You may call one or more of these functions. Each line describes one:\n<tools>\n"
        + "\n".join(lines)
        + '\n</tools>\nTo call a function, write\n<tool_call>\n{"name": <its name>, "arguments": <a JSON object>}\n'
        "</tool_call>"
    )


def calls_text(calls: Sequence[recipe.ToolCall]) -> str:
    """Earlier calls, as the model would have written them."""
    return "".join(
        f'\n{OPEN}{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n{CLOSE}' for call in calls
    )


class Piece(NamedTuple):
    """What can be told of a model's text."""

    text: str
    """For deepseek-recipe, markup and all."""
    read: int
    """Characters of the model's text of which it was made."""
    plain: bool
    """They are the text itself."""


class CallReader:
    """Turns a model's text, piece by piece, into text with deepseek-recipe's markup."""

    def __init__(self, names: frozenset[str], *, in_call: bool, either: bool = False) -> None:
        """`in_call`: the prompt has opened a call already. `either`: an answer that does not begin with a call is a
        text, whatever stands in it."""
        self._names = names
        self._in_call = in_call
        self._tag = "" if in_call else TAG
        """Of the call, as far as the model has written it."""
        self._undecided = either
        """Whether it begins with a call."""
        self._text_only = False
        self._held = ""
        self._calls = 0

    def feed(self, text: str) -> list[Piece]:
        """What of it can be told now. Text that may begin a call waits, a call waits until it is whole."""
        self._held += clean(text)
        out: list[Piece] = []
        while True:
            if self._in_call:
                at = _close(self._held)
                if at < 0:
                    return out
                if _parse(self._held[:at], self._names) is None:  # what looked like strings may have been none
                    at = self._held.index(CLOSE)
                out.append(self._call(self._held[:at], CLOSE))
                self._in_call, self._tag, self._held = False, TAG, self._held[at + len(CLOSE) :]
                continue
            if self._undecided and len(self._held) < len(TAG) and TAG.startswith(self._held):
                return out
            self._text_only |= self._undecided and not self._held.startswith(TAG)
            self._undecided = False
            before, opened, rest = self._held.partition(TAG)
            if opened and not self._text_only:
                out += self._plain(before)
                self._in_call, self._held = True, rest
                continue
            keep = 0 if self._text_only else _overlap(self._held, TAG)
            told = self._held[: len(self._held) - keep]
            self._held = self._held[len(told) :]
            return out + self._plain(told)

    def finish(self) -> list[Piece]:
        """The rest: a call that the end cut, or that a stop string closed, counts if it is whole JSON. A string that
        never ends held no tags."""
        rest: list[Piece] = []
        while self._in_call and CLOSE in self._held and _parse(self._held, self._names) is None:
            body, _, held = self._held.partition(CLOSE)
            rest.append(self._call(body, CLOSE))
            self._in_call, self._tag, self._held = False, TAG, ""
            rest += self.feed(held)
        rest += [self._call(self._held, "")] if self._in_call else self._plain(self._held)
        self._held, self._in_call = "", False
        return [*rest, *([Piece(f"</{DELIMITER} calls>", 0, plain=False)] if self._calls else [])]

    def _plain(self, text: str) -> list[Piece]:
        """Behind a call only further calls count; models put white space between them."""
        if not text:
            return []
        return [Piece("", len(text), plain=False) if self._calls else Piece(text, len(text), plain=True)]

    def _call(self, body: str, close: str) -> Piece:
        read = len(self._tag) + len(body) + len(close)
        found = _parse(body, self._names)
        if found is None:
            text = "" if self._calls else f"{TAG}{body}{close}"
            return Piece(text, read, plain=len(text) == read)
        name, arguments = found
        parameters = "".join(
            f'<{DELIMITER} parameter name="{key}" string="false">{value}</{DELIMITER} parameter>\n'
            for key, value in arguments.items()
        )
        begin = "" if self._calls else f"\n\n<{DELIMITER} calls>\n"
        self._calls += 1
        text = f'{begin}<{DELIMITER} invoke name="{name}">\n{parameters}</{DELIMITER} invoke>\n'
        return Piece(text, read, plain=False)


def clean(text: str) -> str:
    """Without what the markup stands under."""
    return text.replace(DELIMITER, "")


def _close(text: str) -> int:
    """Where the closing tag of a call is, −1: not yet. Inside a string of the call it is text."""
    if CLOSE not in text:  # which is asked for every piece of a long call
        return -1
    return next((found.start() for found in _STRING_OR_CLOSE.finditer(text) if found[0] == CLOSE), -1)


def _parse(body: str, names: frozenset[str]) -> tuple[str, dict[str, str]] | None:
    """Name, and arguments as the model wrote them; None for what is no call of a tool on offer."""
    try:
        call = _members(body)
        name = json.loads(call["name"])
        arguments = _members(call.get("arguments", "{}"))
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or name not in names or not all(NAME.fullmatch(key) for key in arguments):
        return None
    return name, arguments


def _members(text: str) -> dict[str, str]:
    """The texts of an object's values, numbers and all as they are. Raises ValueError for other text."""
    at = _blank(text, 0)
    if text[at : at + 1] != "{":
        raise ValueError("no object")
    at = _blank(text, at + 1)
    out: dict[str, str] = {}
    while text[at : at + 1] != "}":
        if out:
            at = _blank(text, _after(text, at, ","))
        if text[at : at + 1] != '"':
            raise ValueError("a name is a string")
        key, at = _DECODER.raw_decode(text, at)
        at = _blank(text, _after(text, _blank(text, at), ":"))
        _, end = _DECODER.raw_decode(text, at)
        out[key] = text[at:end]
        at = _blank(text, end)
    if text[at + 1 :].strip(" \t\n\r"):
        raise ValueError("more behind the object")
    return out


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)
"""Numbers are checked and not read: they may be longer than Python's."""


def _blank(text: str, at: int) -> int:
    """Behind the white space."""
    found = _BLANK.match(text, at)
    return at if found is None else found.end()


def _after(text: str, at: int, sign: str) -> int:
    if text[at : at + 1] != sign:
        raise ValueError(f"{sign} is missing")
    return at + 1


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)
