"""Rules, constraints, verdicts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headrace.evals.constraints import KINDS, broken
from headrace.evals.datasets import NAMES, RULES, load_dataset
from headrace.evals.errors import EvalError
from headrace.evals.grading import Grade, grade, same
from headrace.evals.items import Check, Item, Rule, Turn, from_entry, to_entry
from headrace.evals.judge import Verdict, Verdicts, key_of, prompt_of, read_verdict


def item(rule: Rule, answer: str = "", *checks: Check) -> Item:
    return Item("i", "s", (Turn("user", "?"),), rule, answer, checks, question="Which?")


@pytest.mark.parametrize(
    ("rule", "reference", "text", "correct"),
    [
        ("boxed_integer", "042", r"\boxed{42}", True),
        ("boxed_integer", "42", "42", False),
        ("letter", "B", "Answer: (B)", True),
        ("letter", "B", "Answer: C", False),
        ("number", "15.5", "Answer: 15.50 kg", True),
        ("number", "15.5", "Answer: 15", False),
        ("exact", "The Nile", "Answer: nile.", True),
        ("exact", "The Nile", "The Danube", False),
        ("json", '{"n": 1, "t": "Lyon"}', '```{"t": "lyon ", "n": 1.0}```', True),
        ("json", '{"n": 1}', '{"n": true}', False),
        ("json", '{"n": 1}', '{"n": 1, "m": 2}', False),
        ("json", '{"n": null}', "{}", False),
    ],
)
def test_rules(rule: Rule, reference: str, text: str, correct: bool) -> None:
    assert grade(item(rule, reference), text).correct is correct
    assert grade(item(rule, reference), f"<think>{text}").correct is False, "thoughts that never end are no answer"


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (Check("words_at_least", count=3), "don't stop well-known things", "two words"),
        (Check("words_at_most", count=2), "two words", "not two words"),
        (Check("sentences", count=2), "It is 1.5 m. So?", "One, two."),
        (Check("lines", count=2), "a\n\nb", "a"),
        (Check("paragraphs", count=2), "a\nb\n\nc", "a\nb"),
        (Check("bullets", count=2), "- a\n* b", "-a\n-b"),
        (Check("numbered", count=2), "1. a\n2) b", "1 a"),
        (Check("contains", "bee"), "A Bee!", "beehive"),
        (Check("contains", "ball", 2), "ball, ball", "ball"),
        (Check("contains_exactly", "bee", 1), "a bee", "bee bee"),
        (Check("avoids", "time"), "sometimes", "Time flies"),
        (Check("starts_with", "Dear"), " Dear you", "My dear"),
        (Check("ends_with", "?"), "why?\n", "why"),
        (Check("lowercase"), "all small 1", "One"),
        (Check("uppercase"), "BIG 1", "Big"),
        (Check("no_commas"), "a b", "a, b"),
        (Check("no_digits"), "four", "4"),
        (Check("quoted"), '"so"', '"so" he said'),
        (Check("json"), '{"a": 1}', '[1]'),
    ],
)  # fmt: skip
def test_constraints(check: Check, good: str, bad: str) -> None:
    assert broken(good, (check,)) == []
    assert len(broken(bad, (check,))) == 1
    assert len(broken("  ", (check,))) == 1, "an empty text keeps nothing"


def test_every_constraint_has_a_case() -> None:
    marks = test_constraints.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {case[0].kind for case in marks} == set(KINDS)
    with pytest.raises(EvalError, match="no constraint 'rhymes'"):
        broken("x", (Check("rhymes"),))


def test_json_equality() -> None:
    assert same([1, {"a": "x"}], [1.0, {"a": " X"}])
    assert not same(True, 1)
    assert not same([1], [1, 2])
    assert same(None, None)
    assert not same(None, 0)


def test_verdicts() -> None:
    assert read_verdict("FOUND: 12\nVERDICT: CORRECT") == Grade(True, "12")
    assert read_verdict("**VERDICT:** **incorrect**") == Grade(False)
    assert read_verdict("VERDICT: CORRECT or VERDICT: INCORRECT? I say VERDICT: INCORRECT") == Grade(False)
    assert read_verdict("<think>VERDICT: CORRECT") is None
    assert read_verdict("It looks correct.") is None
    judged = item("judge", "the Nile")
    prompt = prompt_of(judged, "<think>Danube?</think>It is the Nile")
    assert "Danube" not in prompt
    assert all(part in prompt for part in ("Which?", "the Nile", "It is the Nile"))
    known = Verdicts([{"key": key_of(prompt), "judge": "one", "text": "x"}])
    known.add(Verdict(key_of(prompt), "two", "y"))
    assert known.find(key_of(prompt), "one") == Verdict(key_of(prompt), "one", "x")
    assert known.find(key_of(prompt), None) == Verdict(key_of(prompt), "two", "y")
    assert known.find(key_of(prompt), "three") is None
    with pytest.raises(EvalError, match="needs a judge"):
        grade(judged, "x")


@pytest.mark.parametrize("name", RULES)
def test_shipped_sets_are_sound(name: str) -> None:
    """Their references grade as correct, nothing else does, and they come through JSON unchanged."""
    items = load_dataset(name).items
    assert len(items) >= 24
    for one in items:
        assert from_entry(json.loads(json.dumps(to_entry(one)))) == one
        if one.rule == "checks":
            assert one.checks
            assert grade(one, "").note.count("(") >= 0
            assert not grade(one, "").correct
            continue
        assert grade(one, f"So be it.\nAnswer: {one.answer}").correct, one.identifier
        assert not grade(one, "I cannot say.").correct
    letters = {one.answer for one in items}
    assert name != "facts" or letters == set("ABCD")


def test_shipped_instructions_can_be_followed() -> None:
    """Some of them, by hand: a set that nobody can satisfy would measure nothing."""
    texts = {
        "instructions-04": " ".join(["word"] * 40),
        "instructions-09": "1. a\n2. b\n3. c\n4. d\n5. e",
        "instructions-22": "Dear neighbour,\nmay I have your ladder?\nKind regards",
        "instructions-29": "- Read daily\n- Speak with others",
        "instructions-30": '{"city": "Oslo"}',
        "instructions-31": "the harbour sleeps",
    }
    items = {one.identifier: one for one in load_dataset("instructions").items}
    for name, text in texts.items():
        assert grade(items[name], text).correct, grade(items[name], text).note


def test_samples_are_all_sets_and_a_limit_counts_by_subset() -> None:
    assert len(load_dataset("samples").items) == sum(len(load_dataset(name).items) for name in RULES)
    few = load_dataset("samples", limit=1).items
    assert len({one.subset for one in few}) == len(few) > 10
    with pytest.raises(EvalError, match=f"there are {', '.join(NAMES)}"):
        load_dataset("mmlu")
    with pytest.raises(EvalError, match="hle does not ship"):
        load_dataset("hle")
    with pytest.raises(EvalError, match="no rule 'luck'"):
        from_entry({**to_entry(replace(few[0])), "rule": "luck"})
