"""Calls in the Hermes form, whatever they hold and however they are cut into pieces."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.services.gateway.hermes import CLOSE, DELIMITER, CallReader

TAG = "<tool_call>"
MARKS = (TAG, CLOSE, '"', "\\", "\\u0022", "<tool", "\n", "{}", "é", "x")
STRINGS = st.lists(st.sampled_from(MARKS), max_size=6).map("".join)
VALUES: st.SearchStrategy[Any] = st.recursive(STRINGS | st.integers(), lambda inner: st.lists(inner, max_size=3))
CALLS = st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), min_size=1, max_size=3)
_INVOKE = re.compile(rf'<{DELIMITER} invoke name="f">\n(.*?)</{DELIMITER} invoke>', re.DOTALL)
_PARAMETER = re.compile(rf'<{DELIMITER} parameter name="(\w)" string="false">(.*?)</{DELIMITER} parameter>', re.DOTALL)


def read(text: str, cuts: list[int], *, in_call: bool) -> str:
    """What the reader makes of a text that comes in pieces."""
    reader = CallReader(frozenset({"f"}), in_call=in_call)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [piece for low, high in pairwise(edges) for piece in reader.feed(text[low:high])] + reader.finish()
    assert sum(piece.read for piece in pieces) == len(text)
    return "".join(piece.text for piece in pieces)


def calls_in(markup: str) -> list[dict[str, Any]]:
    return [{name: json.loads(value) for name, value in _PARAMETER.findall(body)} for body in _INVOKE.findall(markup)]


@given(CALLS, st.lists(st.integers(0, 10**6), max_size=8), st.booleans(), st.booleans(), st.booleans())
def test_arguments_may_hold_the_tags(
    asked: list[dict[str, Any]], cuts: list[int], ascii_only: bool, in_call: bool, closed: bool
) -> None:
    """The end of the text, or a stop string, may close the last call."""
    documents = [json.dumps({"name": "f", "arguments": one}, ensure_ascii=ascii_only) for one in asked]
    text = f"\n{CLOSE}\n{TAG}\n".join(documents) + (f"\n{CLOSE}" if closed else "\n")
    assert calls_in(read(text if in_call else f"so\n{TAG}\n{text}", cuts, in_call=in_call)) == asked


@pytest.mark.parametrize("cuts", [[], list(range(200))])
def test_what_is_no_call_is_text(cuts: list[int]) -> None:
    """A string without an end takes none of the calls behind it along."""
    broken = f'{TAG}{{"name": "f, "arguments": {{}}}}{CLOSE}'
    good = f'{TAG}{{"name": "f", "arguments": {{"a": "{CLOSE}"}}}}{CLOSE}'
    out = read(f"a {broken} b {good}", cuts, in_call=False)
    assert out.startswith(f"a {broken} b ")
    assert calls_in(out) == [{"a": CLOSE}]
    assert read(f"a {broken} b", cuts, in_call=False) == f"a {broken} b"
    for other in (f"{TAG}[]{CLOSE}", f'{TAG}{{"name": "g"}}{CLOSE}', f'{TAG}{{"name": "f"', "a <tool_cal"):
        assert read(other, cuts, in_call=False) == other
