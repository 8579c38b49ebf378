"""`headrace evals grade` and `report`: read a run's folder; no model is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.cli.evals_run import eval_errors
from headrace.cli.exits import Exit
from headrace.cli.judges import Judge, open_judge
from headrace.cli.progress import progress_bar
from headrace.evals import judge as judging
from headrace.evals.errors import EvalError
from headrace.evals.grading import REVISION, Grade
from headrace.evals.grading import grade as grade_by_rule
from headrace.evals.items import Item
from headrace.evals.judge import Verdict, Verdicts
from headrace.evals.run_folder import Manifest, RunFolder, key_of, tasks_of
from headrace.evals.statistics import Row, summarise
from headrace.services.runtime.errors import HeadraceError
from headrace.services.runtime.line_log import Entry

__all__ = ["Judge", "grade", "report"]


def grade(path: Path, judge: Judge | None, judge_model: str | None = None) -> int:
    """Grade all answers of a run; the exit status: FAILED when one is missing or has no verdict. Raises CliError."""
    with eval_errors():
        folder = RunFolder(path)
        manifest, items = folder.manifest(), folder.items()
        answers = {key_of(entry): entry for entry in folder.answers()}
        named = judge_model if judge is None else judge.name
        verdicts = _verdicts(folder, manifest, items, answers, judge, named)
        graded = []
        for task in tasks_of(items, manifest):
            answer = answers.get(task.key)
            given = None if answer is None else _grade(task.item, answer, manifest, verdicts, named)
            graded.append(_entry(task.item, task.repeat, answer, given))
        folder.write_grades(graded)
    missing = sum(entry["correct"] is None for entry in graded)
    if missing:
        print(f"headrace: {missing} of {len(graded)} answers are missing or have no verdict", file=sys.stderr)
    return Exit.FAILED if missing else Exit.DONE


def _grade(item: Item, answer: Entry, manifest: Manifest, verdicts: Verdicts, judge: str | None) -> Grade | None:
    thinking = manifest.sampling.thinking is True
    if item.rule != "judge":
        return grade_by_rule(item, answer["answer"], thinking=thinking)
    found = verdicts.find(judging.key_of(judging.prompt_of(item, answer["answer"], thinking=thinking)), judge)
    return None if found is None else judging.read_verdict(found.text)


def _entry(item: Item, repeat: int, answer: Entry | None, given: Grade | None) -> Entry:
    return {
        "item": item.identifier,
        "repeat": repeat,
        "subset": item.subset,
        "correct": None if given is None else given.correct,
        "extracted": "" if given is None else given.extracted,
        "note": "" if given is None else given.note,
        "rule": item.rule,
        "revision": REVISION,
        "finish_reason": None if answer is None else answer.get("finish_reason"),
    }


def _verdicts(
    folder: RunFolder,
    manifest: Manifest,
    items: Sequence[Item],
    answers: Mapping[tuple[str, int], Entry],
    judge: Judge | None,
    named: str | None,
) -> Verdicts:
    """All verdicts that are needed, those asked for that the judge of this name has not given yet."""
    verdicts = Verdicts(folder.verdicts())
    prompts: dict[str, str] = {}
    for task in tasks_of([item for item in items if item.rule == "judge"], manifest):
        answer = answers.get(task.key)
        if answer is None:
            continue
        prompt = judging.prompt_of(task.item, answer["answer"], thinking=manifest.sampling.thinking is True)
        if verdicts.find(judging.key_of(prompt), named) is None:
            prompts[judging.key_of(prompt)] = prompt
    if not prompts:
        return verdicts
    if judge is None:
        raise EvalError(f"{len(prompts)} answers need a judge: name one by --judge (docs/evals.md)")
    _ask_judge(folder, judge, prompts, verdicts)
    return verdicts


def _ask_judge(folder: RunFolder, judge: Judge, prompts: Mapping[str, str], verdicts: Verdicts) -> None:
    keys = list(prompts)
    errors: list[HeadraceError] = []
    with ExitStack() as stack:
        log = stack.enter_context(folder.open_verdicts())
        ask = stack.enter_context(open_judge(judge))
        bar = stack.enter_context(progress_bar())
        shown = bar.add_task("verdicts", total=len(keys))

        def settle(index: int, outcome: str | HeadraceError) -> None:
            bar.advance(shown)
            if isinstance(outcome, HeadraceError):
                errors.append(outcome)
                return
            verdict = Verdict(keys[index], judge.name, outcome)
            if judging.read_verdict(outcome) is not None:
                log.append(asdict(verdict))
            verdicts.add(verdict)

        ask([prompts[key] for key in keys], settle)
    if errors:
        print(f"headrace: {len(errors)} questions to the judge failed; the first: {errors[0]}", file=sys.stderr)


def report(path: Path, *, as_json: bool) -> None:
    """Print the report of a graded run. Raises CliError."""
    with eval_errors():
        folder = RunFolder(path)
        manifest = folder.manifest()
        rows = summarise(folder.grades())
    if as_json:
        print(json.dumps(document(path, manifest, rows), allow_nan=False))
        return
    show(manifest, rows, Console())


def document(path: Path, manifest: Manifest, rows: Sequence[Row]) -> dict[str, Any]:
    """The object of --json."""
    listed = [asdict(row) for row in rows]
    return {"run": str(path), **asdict(manifest), "subsets": listed[:-1], "total": listed[-1]}


def show(manifest: Manifest, rows: Sequence[Row], console: Console) -> None:
    """A table for people."""
    sampling = manifest.sampling
    drawn = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}, {manifest.repeats} each"
    title = (
        f"{manifest.dataset} · {manifest.model} ({manifest.fingerprint[:8]}) · {drawn}, {sampling.max_tokens} tokens"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", title=title, title_justify="left")
    table.add_column("subset", no_wrap=True)
    for name in ("correct", "accuracy", "95 %", "no answer", "cut", "missing"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row), style="bold" if row is rows[-1] else None)
    console.print(table)
    methods = sorted({row.interval.method for row in rows if row.interval is not None})
    console.print(f"95 % intervals: {', '.join(methods) or 'none'}", style="dim", highlight=False)


def _cells(row: Row) -> list[str]:
    span = "–" if row.interval is None else f"{100 * row.interval.low:.1f}–{100 * row.interval.high:.1f} %"
    accuracy = "–" if row.accuracy is None else f"{row.accuracy:.1%}"
    correct = f"{row.correct}/{row.answers}"
    return [row.subset, correct, accuracy, span, str(row.no_answer), str(row.cut), str(row.missing)]
