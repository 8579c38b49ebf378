"""Constraints on a text's form that a rule can verify."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from headrace.evals.errors import EvalError
from headrace.evals.items import Check

_BULLET: Final = re.compile(r"^[ \t]*[-*•][ \t]+\S", re.MULTILINE)
_NUMBERED: Final = re.compile(r"^[ \t]*\d+[.)][ \t]+\S", re.MULTILINE)


def words(text: str) -> list[str]:
    """Runs of letters and digits, with the apostrophes and hyphens inside them."""
    return re.findall(r"\w+(?:['’-]\w+)*", text)


def _count_word(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def _sentences(text: str) -> int:
    *ended, _ = re.split(r"[.!?]+(?=[\s\"'”’)*_]|$)", text)
    return sum(re.search(r"\w", part) is not None for part in ended)


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


KINDS: Final[dict[str, Callable[[str, Check], bool]]] = {
    "words_at_least": lambda text, check: len(words(text)) >= check.count,
    "words_at_most": lambda text, check: len(words(text)) <= check.count,
    "sentences": lambda text, check: _sentences(text) == check.count,
    "lines": lambda text, check: len(_lines(text)) == check.count,
    "paragraphs": lambda text, check: len(_paragraphs(text)) == check.count,
    "bullets": lambda text, check: len(_BULLET.findall(text)) == check.count,
    "numbered": lambda text, check: len(_NUMBERED.findall(text)) == check.count,
    "contains": lambda text, check: _count_word(text, str(check.value)) >= max(1, check.count),
    "contains_exactly": lambda text, check: _count_word(text, str(check.value)) == check.count,
    "avoids": lambda text, check: _count_word(text, str(check.value)) == 0,
    "starts_with": lambda text, check: text.startswith(str(check.value)),
    "ends_with": lambda text, check: text.endswith(str(check.value)),
    "lowercase": lambda text, _: text == text.lower(),
    "uppercase": lambda text, _: text == text.upper(),
    "no_commas": lambda text, _: "," not in text,
    "no_digits": lambda text, _: not any(character.isdigit() for character in text),
    "quoted": lambda text, _: len(text) > 2 and text[0] == text[-1] == '"',
    "json": lambda text, _: _is_json(text),
}
"""What holds of a text that is not empty, outer white space removed."""


def broken(text: str, checks: tuple[Check, ...]) -> list[str]:
    """Names of the constraints that a text does not keep; an empty text keeps none. Raises EvalError for a kind that
    there is not."""
    unknown = [check.kind for check in checks if check.kind not in KINDS]
    if unknown:
        raise EvalError(f"there is no constraint {unknown[0]!r}")
    plain = text.strip()
    return [name_of(check) for check in checks if not plain or not KINDS[check.kind](plain, check)]


def name_of(check: Check) -> str:
    """A constraint in short: `contains(river, 2)`."""
    inside = ", ".join(str(part) for part in (check.value, check.count) if part not in ("", 0))
    return f"{check.kind}({inside})" if inside else check.kind
