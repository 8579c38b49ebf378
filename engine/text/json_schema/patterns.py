"""Regular expressions of schemas (ECMA-262, unanchored) as finite automata over code points (PyPI `interegular`).

interegular reads Python's syntax and matches whole strings; what differs is rewritten here, and what an automaton or
this rewriting cannot do (look-around, back-references, \\b, \\p{…}, anchors inside) is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from interegular import parse_pattern
from interegular.fsm import FSM
from interegular.patterns import InvalidSyntax, Unsupported

from headrace.engine.text.json_schema.errors import SchemaRefused

MOST_STATES = 4096
_SPACE: Final = " \\t\\n\\v\\f\\r\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_LINE_ENDS: Final = "\\n\\r\u2028\u2029"
_ANY: Final = "(?:.|\\n)*"
Refuse = Callable[[str], SchemaRefused]
_CONTROLS: Final = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "0": "\0"}


@lru_cache(maxsize=4096)
def automaton(pattern: str, anchored: bool = False) -> FSM:
    """Accepts the strings in which the pattern is found; `anchored`: which it matches as a whole. Raises
    SchemaRefused."""
    branches = _branches(pattern)
    rewritten = []
    for branch in branches:
        inner, front, back = _between_anchors(branch)
        text = _rewrite(inner, pattern)
        rewritten.append(f"{'' if front or anchored else _ANY}(?:{text}){'' if back or anchored else _ANY}")
    try:
        made = parse_pattern("|".join(rewritten)).to_fsm().reduce()
    except (Unsupported, InvalidSyntax, ValueError, KeyError, NotImplementedError) as error:
        raise SchemaRefused(f"{pattern!r} cannot be made an automaton: {error}", "pattern") from None
    return checked(made)


def checked(made: FSM) -> FSM:
    """Raises SchemaRefused for an automaton that is too large."""
    if len(made.states) > MOST_STATES:
        raise SchemaRefused(f"its automaton has more than {MOST_STATES} states", "pattern")
    return made


def found_in(pattern: str, text: str) -> bool:
    """The pattern is found somewhere in the text."""
    return bool(automaton(pattern).accepts(text))


def stray_anchor(pattern: str) -> bool:
    """Whether there is a ^ or $ elsewhere than at the ends of a branch of the top level."""
    for branch in _branches(pattern):
        inner, _, _ = _between_anchors(branch)
        in_class = False
        for place, char in enumerate(inner):
            if _escaped(inner, place):
                continue
            in_class = char == "[" or (in_class and char != "]")
            if not in_class and char in "^$":
                return True
    return False


def _between_anchors(branch: str) -> tuple[str, bool, bool]:
    """A branch without the anchors at its ends; whether it has one in front and at its back."""
    inner = branch.removeprefix("^")
    front = inner != branch
    back = inner.endswith("$") and not _escaped(inner, len(inner) - 1)
    return inner[:-1] if back else inner, front, back


def _escaped(text: str, place: int) -> bool:
    before = len(text[:place]) - len(text[:place].rstrip("\\"))
    return before % 2 == 1


def _branches(pattern: str) -> list[str]:
    """Alternatives of the top level."""
    out, depth, in_class, start, place = [], 0, False, 0, 0
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            out.append(pattern[start:place])
            start = place + 1
        place += 1
    return [*out, pattern[start:]]


def _rewrite(text: str, whole: str) -> str:
    """The same in Python's syntax, as far as interegular reads it."""

    def refuse(what: str) -> SchemaRefused:
        return SchemaRefused(f"{whole!r} uses {what}", "pattern")

    out: list[str] = []
    in_class = False
    place = 0
    while place < len(text):
        char = text[place]
        if char == "\\":
            if place + 1 == len(text):
                raise refuse("a lone backslash")
            piece, place = _escape(text, place + 1, in_class, refuse)
            out.append(piece)
            continue
        if in_class:
            if char == "]":
                in_class = False
            out.append("\\[" if char == "[" else char)
        elif char == "[":
            in_class = True
            out.append(char)
            if text[place + 1 : place + 2] == "^":
                out.append("^")
                place += 1
            if text[place + 1 : place + 2] == "]":
                raise refuse("an empty class")
        elif char == "(" and text[place + 1 : place + 2] == "?":
            if text.startswith("(?<", place) and text[place + 3 : place + 4] not in ("=", "!"):
                end = text.find(">", place)
                out.append("(?:")
                place = end
            elif text.startswith("(?:", place):
                out.append("(?:")
                place += 2
            else:
                raise refuse("look-around, which an automaton cannot do")
        elif char == ".":
            out.append(f"[^{_LINE_ENDS}]")
        elif char in "^$":
            raise refuse("an anchor inside")
        else:
            out.append(char)
        place += 1
    if in_class:
        raise refuse("a class that does not end")
    return "".join(out)


def _escape(text: str, place: int, in_class: bool, refuse: Refuse) -> tuple[str, int]:
    """The escape whose letter stands at `place`, rewritten; and where to go on."""
    char = text[place]
    if char == "u" and text[place + 1 : place + 2] == "{":
        end = text.find("}", place)
        return _literal(_code(text[place + 2 : end], refuse)), end + 1
    if char in "ux":
        width = 4 if char == "u" else 2
        code = _code(text[place + 1 : place + 1 + width], refuse, width)
        end = place + 1 + width
        if 0xD800 <= code < 0xDC00 and text.startswith("\\u", end):
            low = _code(text[end + 2 : end + 6], refuse, 4)
            return _literal(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)), end + 6
        return _literal(code), end
    if char in _CONTROLS and not (char == "0" and text[place + 1 : place + 2].isdigit()):
        return _literal(ord(_CONTROLS[char])), place + 1
    if char in "dw":
        known = {"d": "0-9", "w": "a-zA-Z0-9_"}[char]
        return (known if in_class else f"[{known}]"), place + 1
    if char == "s":
        return (_SPACE if in_class else f"[{_SPACE}]"), place + 1
    if char in "DWS":
        if in_class:
            raise refuse(f"\\{char} inside a class")
        return f"[^{ {'D': '0-9', 'W': 'a-zA-Z0-9_', 'S': _SPACE}[char] }]", place + 1
    if char == "c" and text[place + 1 : place + 2].isalpha():
        return _literal(ord(text[place + 1].upper()) - 64), place + 2
    if char.isalnum():
        raise refuse(f"\\{char}")
    return _literal(ord(char)), place + 1


def _code(digits: str, refuse: Refuse, width: int | None = None) -> int:
    if not digits or (width is not None and len(digits) != width):
        raise refuse("a broken escape")
    try:
        code = int(digits, 16)
    except ValueError:
        raise refuse("a broken escape") from None
    if code > 0x10FFFF:
        raise refuse("a code point beyond Unicode")
    return code


def _literal(code: int) -> str:
    char = chr(code)
    return char if char.isalnum() or code > 127 or code < 32 else f"\\{char}"
