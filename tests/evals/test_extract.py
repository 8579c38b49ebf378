"""What texts say their answer is: the tricky ones."""

from __future__ import annotations

from fractions import Fraction

import pytest

from headrace.evals import extract
from headrace.evals.constraints import KINDS, broken
from headrace.evals.items import Check


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So the answer is $\boxed{042}$.", 42),
        (r"\boxed{7} was wrong; it is \boxed{ 13 }", 13),
        (r"\boxed{1{,}024}", 1024),
        (r"\boxed{1,024}", 1024),
        (r"\boxed{x = 5}", 5),
        (r"\boxed{\text{204}}", 204),
        (r"\boxed{\mathbf{\text{9}}}", 9),
        (r"\boxed{42^\circ}", 42),
        (r"\boxed{42.0}", 42),
        (r"\boxed {8}", 8),
        (r"\fbox{8}", 8),
        (r"\boxed{−3}", -3),
        (r"\boxed{12} and then \boxed{13", 12),
        (r"\boxed{\frac{1}{2}}", None),
        (r"\boxed{3 or 4}", None),
        (r"\boxed{}", None),
        (r"The answer is 42.", None),
        ("", None),
    ],
)
def test_boxed_integers(text: str, answer: int | None) -> None:
    assert extract.boxed_integer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: C", "C"),
        ("**Answer: C**", "C"),
        ("**Answer:** (C)", "C"),
        ("Answer: **C) Mercury**", "C"),
        ("The correct answer is B.", "B"),
        ("Therefore the answer is (D), as shown.", "D"),
        (r"The final answer is $\boxed{A}$", "A"),
        (r"Answer: \boxed{\text{B}}", "B"),
        (r"\boxed{(C)}", "C"),
        ("C", "C"),
        (" (b) ".upper(), "B"),
        ("C) Mercury", "C"),
        ("C. Mercury", "C"),
        ("**C) Mercury**\n\nIt is the planet nearest to the Sun.", "C"),
        ("A) Venus\nB) Mercury", None),
        ("First, the list.\nB) Mercury", None),
        ("C++ is none.", None),
        ("Answer: A\n\nNo, wait. Answer: D", "D"),
        ("Answer: A, since it is the nearest.", "A"),
        ("Answer: A because it is near", "A"),
        ("Answer: B because it is near", "B"),
        ("Answer: Apple", None),
        ("Answer: A gas giant", None),
        ("Answer: A or B", None),
        ("Answer: B and C", None),
        ("A planet near the Sun has no moon.", None),
        ("Options A and B are out.", None),
        ("Answer: E", None),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_letters(text: str, answer: str | None) -> None:
    assert extract.letter(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7, so 7 apples", 7),
        ("Answer: 1,234.50 euros", Fraction("1234.5")),
        ("Answer: $12\nCheck: 12 = 3 * 4, and 99 is not.", 12),
        ("The answer is: 18 rolls, since 90 - 72 = 18.", 18),
        ("Answer: 6 * 3 = 18", 18),
        ("That leaves −5 degrees", -5),
        ("It is 12-5", 5),
        ("He has 3/4 of it", Fraction(3, 4)),
        (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
        (r"We get \boxed{15.5} kg in 3 steps", Fraction("15.5")),
        ("5/0", None),
        ("none", None),
    ],
)
def test_numbers(text: str, answer: Fraction | int | None) -> None:
    assert extract.number(text) == answer


def test_thoughts_are_no_answer() -> None:
    assert extract.final_part("<think>Answer: A</think>\nAnswer: B") == "Answer: B"
    assert extract.final_part("Answer: A\n</think>Answer: B", thinking=True) == "Answer: B"
    assert extract.final_part("<think>Answer: A, or perhaps") == ""
    assert extract.final_part("Answer: A, or perhaps", thinking=True) == "", "the prompt has opened the thoughts"
    assert extract.final_part(" Answer: A ") == "Answer: A"


def test_json_objects() -> None:
    assert extract.json_object('Sure:\n```json\n{"a": {"b": 1}}\n```\nDone {') == {"a": {"b": 1}}
    assert extract.json_object('first {"a": 1}, better {"a": 2}') == {"a": 2}
    assert extract.json_object("{'a': 1}") is None
    assert extract.json_object("[1]") is None
    assert extract.json_object("{" * 5000) is None


@pytest.mark.parametrize("loop", ["\\boxed{", '{"a": ', "answer: ", "\n", "A ", "- ", "1,", "**", "word "])
def test_texts_that_repeat_themselves_end_soon(loop: str) -> None:
    """A model that loops writes tens of thousands of equal tokens: no rule may take their square."""
    text = loop * 5_000
    extract.boxed_integer(text)
    extract.letter(text)
    extract.number(text)
    extract.normalised(extract.said(text))
    extract.json_object(text[:10_000])
    for kind in KINDS:
        broken(text, (Check(kind, "bee", 3),))


def test_short_answers() -> None:
    assert extract.said("Thus.\nAnswer: The  Nile!\nConfidence: 90%") == "The  Nile!"
    assert extract.normalised("The  Nile!") == extract.normalised("nile")
    assert extract.normalised("Ångström") != extract.normalised("Angstrom")
