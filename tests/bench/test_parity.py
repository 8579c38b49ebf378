"""bench/parity.py: it sees differences where there are some, and a tiny model agrees with itself by every way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench._progress import Phases
from bench.parity import Suite, make_report, run_suite
from bench.parity_harness.answers import Answer, ChoiceAnswer, compare, first_different
from bench.parity_harness.cases import CaseList, smollm2_cases
from bench.parity_harness.oracle import load_folder
from bench.parity_harness.texts import logbook
from headrace.engine.loading import ModelSettings
from headrace.engine.text.assets import TextAssets, load_text_assets
from headrace.engine.text.byte_tokenizer import make_byte_tokenizer
from headrace.engine.text.tokenizer import Tokenizer
from tests.services import tiny

ANSWER = Answer(
    (ChoiceAnswer((5, 6, 7), "abc", "length", (-1.0, -2.0, -3.0), (0.5, 0.25, 0.125)), ChoiceAnswer((8,), "d", "stop"))
)


def changed(choice: int, **fields: object) -> Answer:
    choices = list(ANSWER.choices)
    choices[choice] = replace(choices[choice], **fields)  # type: ignore[arg-type]
    return Answer(tuple(choices))


@pytest.mark.parametrize(
    ("other", "choice", "position", "margin"),
    [
        (changed(0, token_ids=(5, 9, 7)), 0, 1, 0.25),
        (changed(0, token_ids=(5, 6)), 0, 2, 0.125),
        (changed(1, token_ids=(8, 8)), 1, 1, None),
        (changed(0, text="abd"), 0, 3, None),
        (changed(1, reason="length"), 1, 1, None),
        (Answer(ANSWER.choices[:1]), 0, 0, None),
    ],
    ids=["token", "shorter", "longer", "text", "reason", "choices"],
)
def test_every_difference_is_named(other: Answer, choice: int, position: int, margin: float | None) -> None:
    found = compare("a", "b", {"greedy:x": ANSWER}, {"greedy:x": other}, ["greedy:x"])
    assert (found.compared, found.equal) == (1, 0)
    (difference,) = found.differences
    assert (difference.request, difference.pair) == ("greedy:x", "a = b")
    assert (difference.choice, difference.position, difference.margin) == (choice, position, margin)


def test_a_missing_answer_is_a_difference() -> None:
    found = compare("a", "b", {"greedy:x": ANSWER}, {}, ["greedy:x"])
    assert (found.compared, found.equal) == (1, 0)
    assert "b gave no answer" in found.differences[0].what


def test_equal_answers_count_their_tokens_and_logprobs() -> None:
    same = changed(1, logprobs=(-4.0,))
    found = compare("a", "b", {"x": same}, {"x": same}, ["x"])
    assert (found.compared, found.equal, found.tokens) == (1, 1, 4)
    assert (found.with_logprobs, found.same_logprobs) == (1, 1)
    assert first_different([1, 2], [1, 2]) is None


def byte_assets() -> TextAssets:
    tokenizer = Tokenizer(make_byte_tokenizer().serialized)
    return TextAssets(tokenizer, _Chat(tokenizer), (), None, b"")


class _Chat:
    digest_input = b""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, messages: object, *, thinking: bool) -> object:
        class Encoded:
            token_ids = tuple(self._tokenizer.encode_plain(repr(messages)))

        return Encoded


def test_the_24_prompts() -> None:
    """Short, 3,000 tokens, shared prefixes and stop strings are among them; names and seeds are distinct."""
    cases = smollm2_cases(byte_assets())
    assert len(cases) == 24
    assert len({case.name for case in cases}) == len({case.seed for case in cases}) == 24
    assert max(len(case.token_ids) for case in cases if case.name == "long/3000") == 3000
    assert sum(bool(case.stop) for case in cases) >= 4
    shared = [case for case in cases if case.name.startswith("shared/")]
    assert len({case.token_ids[:400] for case in shared}) == 1
    assert logbook(3, seed=1).split("\n")[0] != logbook(3, seed=2).split("\n")[0]


def test_a_tiny_model_by_every_way(tmp_path: Path) -> None:
    """L5: transformers, one process, and real processes over gRPC, one by one and mixed: the same tokens."""
    pytest.importorskip("transformers", reason="transformers is the oracle (extra dev)")
    torch.set_num_threads(1)
    folder = tiny.make_v3(tmp_path / "model")
    assets = load_text_assets(folder)
    add = CaseList(assets)
    add.text("short", "Water", 8)
    add.exact("block", logbook(1), 2 * tiny.BLOCK, 6)
    add.text("shared", logbook(1)[: 3 * tiny.BLOCK], 6, stop=("e", "\n"))
    exact = {"dtype": "float32", "batch_invariant": True, "block_tokens": tiny.BLOCK, "native_kernels": False}
    sets = (*(f"load.{name}={str(value).lower()}" for name, value in exact.items()), "engine.kv_bytes=16777216")
    suite = Suite(
        "tiny",
        folder,
        add.cases,
        {"prefill": 1, "decode": 1},
        lambda: load_folder(folder, assets.tokenizer),
        sets=sets,
        load=ModelSettings(**exact),
    )
    with Phases() as progress:
        result = run_suite(suite, progress)
    report = json.loads(make_report([suite], [result]).to_json())
    assert report["differences"] == []
    assert report["compared"] == report["equal"] == 3 + 3 * 6
    assert sum(report["replica_pairs"]["tiny"].values()) == 2 * 6
    assert all(row["same_logprobs"] == 3 for row in report["rows"] if row["pair"] != "transformers = offline-1")
