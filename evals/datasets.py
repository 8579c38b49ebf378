"""Data sets by name: those that ship, written for this project, and those whose file the user brings."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from headrace.evals.errors import EvalError
from headrace.evals.items import Check, Item, Rule, Turn
from headrace.evals.published import LOADERS
from headrace.evals.rows import Row, digest_of, field, read_rows

SAMPLES: Final = Path(__file__).resolve().parent / "samples"
RULES: Final[dict[str, Rule]] = {
    "arithmetic": "number",
    "facts": "letter",
    "instructions": "checks",
    "extraction": "json",
}
"""Sets that ship, and how each is graded. Licence: samples/LICENSE."""
TASKS: Final = {
    "arithmetic": "\n\nWork it out, then end with a line of the form `Answer: N`, where N is a number.",
    "facts": "\n\nEnd with a line of the form `Answer: X`, where X is one of A, B, C, D.",
    "instructions": "",
    "extraction": "\n\nReply with one JSON object and nothing else.",
}
ALL_SAMPLES: Final = "samples"
NAMES: Final = (*RULES, ALL_SAMPLES, *LOADERS)


@dataclass(frozen=True)
class Dataset:
    """Questions, and which bytes they came from."""

    name: str
    digest: str
    """SHA-256 of the file, or of the files' digests."""
    items: tuple[Item, ...]


def load_dataset(name: str, data: Path | None = None, limit: int | None = None) -> Dataset:
    """A set by name; `data` is the file of a published one, `limit` the most items of each subset. Raises EvalError."""
    if name in LOADERS:
        if data is None:
            raise EvalError(f"{name} does not ship: name its file by --data (docs/evals.md says where it is published)")
        items, digest = LOADERS[name](data), digest_of(data)
    elif name in NAMES:
        if data is not None:
            raise EvalError(f"{name} ships with Headrace; --data is for {', '.join(LOADERS)}")
        names = tuple(RULES) if name == ALL_SAMPLES else (name,)
        items = [item for one in names for item in _load_samples(one)]
        digest = "+".join(digest_of(SAMPLES / f"{one}.jsonl")[:16] for one in names)
    else:
        raise EvalError(f"no set {name!r}; there are {', '.join(NAMES)}")
    twice = [identifier for identifier, count in Counter(item.identifier for item in items).items() if count > 1]
    if twice:
        raise EvalError(f"{data or name}: two items are called {twice[0]!r}")
    return Dataset(name, digest, tuple(items if limit is None else _first(items, limit)))


def _first(items: list[Item], limit: int) -> list[Item]:
    seen: Counter[str] = Counter()
    taken = []
    for item in items:
        seen[item.subset] += 1
        if seen[item.subset] <= limit:
            taken.append(item)
    return taken


def _load_samples(name: str) -> list[Item]:
    path = SAMPLES / f"{name}.jsonl"
    return [_sample(name, row, path) for row in read_rows(path)]


def _sample(name: str, row: Row, path: Path) -> Item:
    question = field(row, path, "question")
    item = Item(
        identifier=field(row, path, "id"),
        subset=f"{name}/{field(row, path, 'subset')}",
        turns=(Turn("user", question + _choices(row) + TASKS[name]),),
        rule=RULES[name],
        question=question,
    )
    if item.rule == "checks":
        return replace(item, checks=tuple(Check(**check) for check in row["checks"]))
    return replace(item, answer=_answer(row["answer"]))


def _answer(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _choices(row: Row) -> str:
    listed = [f"{letter}) {choice}" for letter, choice in zip("ABCD", row.get("choices", []), strict=False)]
    return "".join(f"\n{line}" for line in ["", *listed]) if listed else ""
