"""Published data sets, from files that the user brings: their columns are in docs/evals.md."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from headrace.evals.errors import EvalError
from headrace.evals.extract import parse_integer
from headrace.evals.items import Item, Turn
from headrace.evals.rows import Row, field, read_rows

AIME_TASK: Final = (
    "\n\nThe answer is an integer from 0 to 999. Think step by step, and put it at the end into \\boxed{}."
)
GPQA_TASK: Final = "\n\nThink step by step, then end with a line of the form `Answer: X`, where X is one of A, B, C, D."
HLE_SYSTEM: Final = (
    "Answer the question. Explain your choice briefly, then end with two lines: `Answer:` with the final answer alone, "
    "and `Confidence:` with how sure you are of it, in percent."
)
LETTERS: Final = "ABCD"


def load_aime(path: Path) -> list[Item]:
    """AIME: columns problem, answer (an integer), and problem_idx or id. Raises EvalError."""
    items = []
    for number, row in enumerate(read_rows(path), 1):
        name = field({**row, "_": number}, path, "problem_idx", "id", "ID", "_")
        answer = field(row, path, "answer", "Answer")
        value = parse_integer(answer)
        if value is None or not 0 <= value <= 999:
            raise EvalError(f"{path}: problem {name}: {answer!r} is no integer from 0 to 999")
        problem = field(row, path, "problem", "question", "Problem")
        items.append(Item(name, "aime", (Turn("user", problem + AIME_TASK),), "boxed_integer", str(value)))
    return items


def load_gpqa(path: Path) -> list[Item]:
    """GPQA: columns Question, Correct Answer, Incorrect Answer 1 … 3, Record ID, High-level domain.

    The order of the choices follows from the record's id (its text, where it has none), so that it is the same in every
    run and each place is right about as often. Raises EvalError.
    """
    items = []
    for row in read_rows(path):
        question = field(row, path, "Question")
        right = field(row, path, "Correct Answer")
        choices = [right, *(field(row, path, f"Incorrect Answer {number}") for number in (1, 2, 3))]
        name = field({**row, "_": hashlib.sha256(question.encode()).hexdigest()[:16]}, path, "Record ID", "_")
        order = sorted(range(4), key=partial(_place, name))
        listed = "\n".join(f"{letter}) {choices[place]}" for letter, place in zip(LETTERS, order, strict=True))
        turn = Turn("user", f"{question}\n\n{listed}{GPQA_TASK}")
        subset = field({**row, "_": "gpqa"}, path, "High-level domain", "_")
        items.append(Item(name, subset, (turn,), "letter", LETTERS[order.index(0)]))
    return items


def load_hle(path: Path) -> list[Item]:
    """Humanity's Last Exam: columns id, question, answer, image (a data URL, or empty), category. Raises EvalError."""
    items = []
    for row in read_rows(path):
        question = field(row, path, "question")
        turns = (Turn("system", HLE_SYSTEM), Turn("user", question, _images(row, path)))
        name, answer = field(row, path, "id"), field(row, path, "answer")
        subset = field({**row, "_": "hle"}, path, "category", "_")
        items.append(Item(name, subset, turns, "judge", answer, question=question))
    return items


def _place(name: str, place: int) -> bytes:
    """What orders a record's choices."""
    return hashlib.sha256(f"{name}:{place}".encode()).digest()


def _images(row: Row, path: Path) -> tuple[str, ...]:
    image = row.get("image")
    if not image:
        return ()
    if not isinstance(image, str) or not image.startswith("data:image/"):
        raise EvalError(f"{path}: {row.get('id')}: its image is no data URL")
    return (image,)


LOADERS: Final[dict[str, Callable[[Path], list[Item]]]] = {
    "aime-2026": load_aime,
    "gpqa-diamond": load_gpqa,
    "hle": load_hle,
}
