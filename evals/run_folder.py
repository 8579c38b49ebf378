"""The folder of a run: what was asked, of which model, and what it answered; later grades and verdicts.

run.json       which set, model and sampling; written once, and compared when a run is continued
items.jsonl    the questions with their references: grading needs no data file
answers.jsonl  one line per answer, appended as they come
verdicts.jsonl what a judge said, appended as it comes
grades.jsonl   one line per answer, written anew by each grading
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from headrace.evals.datasets import Dataset
from headrace.evals.errors import EvalError, file_errors
from headrace.evals.items import Item, from_entry, to_entry
from headrace.services.runtime.files import write_whole
from headrace.services.runtime.line_log import Entry, LineLog, line_of, read_log

FORMAT: Final = 1
MANIFEST, ITEMS, ANSWERS = "run.json", "items.jsonl", "answers.jsonl"
VERDICTS, GRADES = "verdicts.jsonl", "grades.jsonl"
_MODE: Final = 0o666


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; None leaves it to the server."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int = 1024
    thinking: bool | None = None


@dataclass(frozen=True)
class Manifest:
    """What a run is."""

    dataset: str
    digest: str
    """Of the set's file."""
    items: int
    model: str
    fingerprint: str
    """SHA-256 of weights, config and numeric mode."""
    sampling: Sampling
    seed: int
    repeats: int
    """Answers to each question."""
    format: int = FORMAT


@dataclass(frozen=True)
class Task:
    """One answer that is wanted."""

    item: Item
    repeat: int
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        return self.item.identifier, self.repeat


def tasks_of(items: Sequence[Item], manifest: Manifest) -> list[Task]:
    """All answers of a run. A seed follows from the run's, the item and the repeat: no order matters."""
    return [
        Task(item, repeat, _seed(manifest.seed, item.identifier, repeat))
        for item in items
        for repeat in range(manifest.repeats)
    ]


def _seed(seed: int, identifier: str, repeat: int) -> int:
    digest = hashlib.sha256(json.dumps([seed, identifier, repeat]).encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


class RunFolder:
    """Reads and writes the files of a run. All methods raise EvalError for files that are not as they were written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, manifest: Manifest, dataset: Dataset) -> None:
        """Make the folder, or find in it the same run as before. Raises EvalError for another one."""
        file = self.path / MANIFEST
        with file_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                names = [path.name for path in self.path.iterdir()]
                # What a kill between the two files leaves is no obstacle.
                left = [name for name in names if ITEMS not in name and MANIFEST not in name]
                if left:
                    raise EvalError(f"{self.path} is no run folder: it has {left[0]}; name a new one")
                whole = b"".join(line_of(to_entry(item)) for item in dataset.items)
                write_whole(self.path / ITEMS, whole, _MODE)
                write_whole(file, f"{json.dumps(asdict(manifest), indent=2)}\n".encode(), _MODE)
                return
        former = self.manifest()
        if former != manifest:
            was, now = asdict(former), asdict(manifest)
            changed = ", ".join(f"{name} {was[name]!r}, not {now[name]!r}" for name in was if was[name] != now[name])
            raise EvalError(f"{self.path} holds another run: {changed}; name another folder to begin anew")

    def manifest(self) -> Manifest:
        """What the run is."""
        file = self.path / MANIFEST
        try:
            entry = json.loads(file.read_text(encoding="utf-8"))
            if entry["format"] != FORMAT:
                raise EvalError(f"{file} has format {entry['format']}; this version reads {FORMAT}")
            return Manifest(**{**entry, "sampling": Sampling(**entry["sampling"])})
        except FileNotFoundError:
            raise EvalError(f"{self.path} is no run folder: `headrace evals run` makes one") from None
        except OSError as error:
            raise EvalError(f"{file}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, EvalError):
                raise
            raise EvalError(f"{file} cannot be read: {error}") from error

    def items(self) -> list[Item]:
        """The questions."""
        return [from_entry(entry) for entry in self._read(ITEMS)]

    def answers(self) -> list[Entry]:
        """Answers so far, errors left out."""
        return [entry for entry in self._read(ANSWERS) if is_answer(entry)]

    def verdicts(self) -> list[Entry]:
        """Verdicts so far."""
        return self._read(VERDICTS)

    def grades(self) -> list[Entry]:
        """Grades of the last grading. Raises EvalError where there was none."""
        if not (self.path / GRADES).exists():
            raise EvalError(f"{self.path} is not graded: `headrace evals grade {self.path}` does it")
        return self._read(GRADES)

    def write_grades(self, grades: Sequence[Entry]) -> None:
        """Replace the grades."""
        with file_errors(self.path / GRADES):
            write_whole(self.path / GRADES, b"".join(map(line_of, grades)), _MODE)

    def open_answers(self) -> LineLog:
        """For appending; errors of an earlier run are taken out, so that they are asked again."""
        with file_errors(self.path / ANSWERS):
            return LineLog(self.path / ANSWERS, is_answer)

    def open_verdicts(self) -> LineLog:
        """For appending."""
        with file_errors(self.path / VERDICTS):
            return LineLog(self.path / VERDICTS)

    def _read(self, name: str) -> list[Entry]:
        with file_errors(self.path / name):
            return read_log(self.path / name)


def is_answer(entry: Entry) -> bool:
    """Whether a line of answers.jsonl is one, and no error."""
    return entry.get("error") is None and isinstance(entry.get("answer"), str)


def key_of(entry: dict[str, Any]) -> tuple[str, int]:
    """Which answer a line of answers.jsonl or grades.jsonl is about."""
    return str(entry["item"]), int(entry["repeat"])
