"""What a text says its answer is. Nothing is guessed: a text that names none, or several at once, has none."""

from __future__ import annotations

import json
import re
import unicodedata
from fractions import Fraction
from typing import Any, Final

THOUGHTS_END: Final = "</think>"
THOUGHTS_BEGIN: Final = "<think>"
_NEAR: Final = 200
"""Characters after `answer:` in which the answer is looked for."""
_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s*\{")
_WRAPPED: Final = re.compile(r"\\(?:text|textbf|mathbf|mathrm|mathit|displaystyle|bf|rm)\s*\{([^{}]*)\}")
_SAID: Final = re.compile(
    r"(?:\banswer\b\W{0,4}(?:is|:|=)|\banswer\*{0,2}\s*:|\boption\s+is|\bchoice\s+is)[\s*_$:]*", re.IGNORECASE
)
_NUMBER: Final = re.compile(r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?|[-+]?\.\d+")


def final_part(text: str, *, thinking: bool = False) -> str:
    """The text after the model's thoughts; empty where they never end. `thinking`: the prompt has opened them."""
    _, ended, rest = text.rpartition(THOUGHTS_END)
    if ended:
        return rest.strip()
    return "" if thinking or THOUGHTS_BEGIN in text else text.strip()


def boxed(text: str) -> str | None:
    """Content of the last \\boxed{…} whose braces close; None without one."""
    boxes = {match.end() for match in _BOX.finditer(text)}
    open_braces: list[int] = []
    last = (0, 0)
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            open_braces.append(brace.end())
        elif open_braces and (begin := open_braces.pop()) in boxes:
            last = max(last, (begin, brace.start()))
    return text[slice(*last)].strip() if last[0] else None


def boxed_integer(text: str) -> int | None:
    """The integer in the last box: `\\boxed{042}`, `\\boxed{x = 1{,}024}`, `\\boxed{\\text{7}}`."""
    content = boxed(text)
    return None if content is None else parse_integer(content)


def parse_integer(text: str) -> int | None:
    """A text that is one integer but for decoration; None for anything else."""
    plain = text.replace("{,}", ",").replace("−", "-")
    while (bare := _WRAPPED.sub(r"\1", plain)) != plain:
        plain = bare
    plain = re.sub(r"\\[,;!:\s]|\\(?:left|right)|[$\s]|\^\{?\\circ\}?", "", plain).rstrip(".")
    plain = plain.rpartition("=")[2].strip("{}")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+", plain):
        plain = plain.replace(",", "")
    if re.fullmatch(r"[-+]?\d+\.0+", plain):
        plain = plain.partition(".")[0]
    return int(plain) if re.fullmatch(r"[-+]?\d{1,30}", plain, re.ASCII) else None


def letter(text: str, letters: str = "ABCD") -> str | None:
    """The choice that a text names: its last `Answer: X` in any of the usual clothes, else its last box, else the
    letter that it begins with, alone or as `C) Mercury`, where no other line begins so."""
    one = rf"(?:\\boxed\s*\{{\s*)?(?:\\text\s*\{{\s*)?[(\[*_`]*([{letters}])(?![A-Za-z0-9'’])"
    for said in reversed(list(_SAID.finditer(text))):
        near = text[said.end() : said.end() + _NEAR]
        match = re.match(one, near)
        if match is not None:
            rest = near[match.end() :]
            return None if _says_more(match[1], rest, letters) else match[1]
    content = boxed(text)
    if content is not None:
        bare = _WRAPPED.sub(r"\1", content).strip(" ().")
        return bare if len(bare) == 1 and bare in letters else None
    named = re.findall(rf"^[ (\[*_`]*([{letters}])(?:[ )\].*_`]*$|[)\].:][*_`]* .*$)", text, re.MULTILINE)
    return named[0] if len(named) == 1 and text.lstrip(" \n([*_`").startswith(named[0]) else None


def _says_more(found: str, rest: str, letters: str) -> bool:
    """Whether what follows makes a letter doubtful: `A or B`, and the article of `A gas giant`."""
    line = rest.lstrip("})]*_`$ ").partition("\n")[0].strip()
    if re.match(rf"(?:or|and|/|,)\s*[(\[*]*[{letters}]\b", line):
        return True
    return (
        found == "A"
        and rest[:1] == " "
        and re.match(r"[a-z]", line) is not None
        and not re.match(r"(?:because|since|as|which|is)\b", line)
    )


def number(text: str) -> Fraction | None:
    """The number that a text gives as its answer: in its last box, after its last `answer:`, else its last one."""
    content = boxed(text)
    if content is not None and (value := _first_number(content)) is not None:
        return value
    for said in reversed(list(_SAID.finditer(text))):
        if (value := _first_number(text[said.end() : said.end() + _NEAR].partition("\n")[0])) is not None:
            return value
    found = _numbers(text)
    return found[-1] if found else None


def _first_number(text: str) -> Fraction | None:
    if "=" in text:
        text = text.rpartition("=")[2]
    found = _numbers(text)
    return found[0] if found else None


def _numbers(text: str) -> list[Fraction]:
    plain = text.replace("−", "-").replace("{,}", ",").replace("\\$", "$")
    plain = re.sub(r"\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}", r"\1/\2", plain)
    values = []
    for match in _NUMBER.finditer(plain):
        # A minus between two numbers is an operator: 12-5.
        word = match[0]
        if word[0] in "+-" and match.start() and plain[match.start() - 1].isalnum():
            word = word[1:]
        top, _, bottom = re.sub(r"[$,\s]", "", word).partition("/")
        if bottom and Fraction(bottom) == 0:
            continue
        values.append(Fraction(top) / Fraction(bottom or "1"))
    return values


def parse_number(text: str) -> Fraction | None:
    """A reference number."""
    found = _numbers(text)
    return found[0] if len(found) == 1 else None


def said(text: str) -> str:
    """A short answer: what follows the last `answer:` on its line, else the whole text."""
    places = list(_SAID.finditer(text))
    return (text[places[-1].end() :].partition("\n")[0] if places else text).strip()


def normalised(text: str) -> str:
    """Without case, accents of width, punctuation, articles and runs of spaces: for comparing short answers."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = "".join(character if character.isalnum() or character.isspace() else " " for character in plain)
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the"))


def json_object(text: str) -> Any:
    """The last JSON object that stands in a text, in a fence or not; None without one."""
    decoder = json.JSONDecoder()
    found: Any = None
    place = text.find("{")
    while place >= 0:
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)
    return found
