"""Rules of one grammar in xgrammar's EBNF, under names that are drawn once."""

from __future__ import annotations

from collections.abc import Iterable

MOST_RULES = 20_000
COMMON = r"""comma ::= "," " "?
colon ::= ":" " "?
control ::= "\\" [bfnrt] | "\\u000" [0-7be-f] | "\\u001" [0-9a-f]
escaped ::= "\\" ["\\] | control
any_string ::= "\"" rest_of_string
rest_of_string ::= "\"" | [^"\\\u0000-\u001f\ud800-\udfff] rest_of_string | escaped rest_of_string
any_number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\-]? [0-9]+)?
any_array ::= "[" (any (comma any)*)? "]"
any_object ::= "{" (any_string colon any (comma any_string colon any)*)? "}"
any ::= any_object | any_array | any_string | any_number | "true" | "false" | "null"
"""
"""What stands in every grammar. Text is compact JSON, but one space may follow a comma or a colon: models like it.
A string is a recursion at its end: with one rule per character every token that goes on behind the first would have to
be tried against the whole grammar at each step (measured with 49,152 tokens: 30 ms a mask instead of 40 µs)."""


class TooManyRules(ValueError):
    """The grammar grows beyond reason."""


class Rules:
    """Made in any order; `text` puts the root first."""

    def __init__(self, common: str = COMMON) -> None:
        self._common = common
        self._rules: dict[str, str] = {}

    def name(self, kind: str) -> str:
        """A fresh name."""
        if len(self._rules) >= MOST_RULES:
            raise TooManyRules(f"it needs more than {MOST_RULES} rules")
        name = f"{kind}{len(self._rules)}"
        self._rules[name] = ""
        return name

    def set(self, name: str, branches: Iterable[str]) -> None:
        """The rule's alternatives."""
        self._rules[name] = " | ".join(dict.fromkeys(branches))

    def make(self, kind: str, branches: Iterable[str]) -> str:
        """A fresh rule."""
        name = self.name(kind)
        self.set(name, branches)
        return name

    def text(self, root: str) -> str:
        rules = "".join(f"{name} ::= {body}\n" for name, body in self._rules.items())
        return f"root ::= {root}\n{self._common}{rules}"


def quoted(text: str) -> str:
    """A literal of the grammar."""
    out = "".join(_in_literal(char) for char in text)
    return f'"{out}"'


def _in_literal(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    return char if char.isprintable() and ord(char) < 0x7F else _code(char)


def in_class(char: str) -> str:
    """A character inside [ ]."""
    return char if char.isalnum() and ord(char) < 128 else _code(char)


def _code(char: str) -> str:
    # Not \\x…, which takes all hexadecimal digits that follow.
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def text_without(never: str, rule: str, closing: str, plain: str, escaped: str = "") -> str:
    """Rules of texts in which `never` does not occur, up to `closing`: `rule` and one for each beginning of it.
    `plain`: what a class of all other characters excludes; `escaped`: an expression for those written otherwise."""
    chars = sorted(set(never))
    other = "".join(map(in_class, chars))
    lines = []
    for place in range(len(never)):
        ways = [closing, f"[^{plain}{other}] {rule}", *([f"{escaped} {rule}"] if escaped else [])]
        for char in chars:
            come = _come(never, never[:place] + char)
            if come < len(never):
                ways.append(f"{quoted(char)} {rule}{come or ''}")
        lines.append(f"{rule}{place or ''} ::= {' | '.join(ways)}\n")
    return "".join(lines)


def _come(never: str, text: str) -> int:
    """How much of the beginning of `never` stands at the end of the text."""
    return next((size for size in range(len(text), 0, -1) if never.startswith(text[-size:])), 0)
