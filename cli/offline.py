"""`headrace offline`: a file of requests answered by an engine in this process or by a cluster.

Headrace's own lines are answered here, in their order; batch files of the OpenAI API (batch.py) by either.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.progress import Progress, TaskID, TextColumn

from headrace.cli.askers import Asker
from headrace.cli.batch import is_batch, opened, read_batch, run_batch
from headrace.cli.batch_bodies import Conversion
from headrace.cli.exits import CliError, Exit
from headrace.cli.progress import progress_bar
from headrace.cli.request_line import LineError, parse_line
from headrace.cli.sources import Source, load_runner, open_asker, text_folder
from headrace.engine.text.errors import TextError
from headrace.services.runtime.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.cli.offline_engine import OfflineRunner, Result
    from headrace.v1 import inference_pb2


@dataclass
class Line:
    """One line of the file."""

    number: int
    identifier: str | int | None
    request: inference_pb2.GenerateRequest | None
    error: str = ""


def offline(source: Source, file: Path, output: Path | None) -> int:
    """Run the file; the exit status. Raises CliError for what is wrong before the first request."""
    text = read_text(file)
    if is_batch(text):
        return _batch(source, text, output)
    if source.folder is None:
        raise CliError("these lines are Headrace's own and need --model; a cluster takes batch files (docs/cli.md)")
    lines = list(read_lines(text, Path() if str(file) == "-" else file.parent))
    runner = load_runner(source, source.folder)
    with _opened(output) as out:
        failed = run_lines(lines, runner, out)
    return _verdict(failed, len(lines))


def _batch(source: Source, text: str, output: Path | None) -> int:
    lines = read_batch(text)
    again = "" if output is None else "; what is answered is kept: repeat the command to go on"
    with opened(output) as (done, put), ExitStack() as stack:
        try:
            failed = run_batch(lines, done, lambda: _opened_for_batch(source, stack), put)
        except KeyboardInterrupt:
            raise CliError(f"interrupted{again}", Exit.INTERRUPTED) from None
    return _verdict(failed, len(lines))


def _opened_for_batch(source: Source, stack: ExitStack) -> tuple[Asker, Conversion]:
    folder = text_folder(source)
    asker = stack.enter_context(open_asker(source))
    try:
        return asker, Conversion(asker.model, folder)
    except TextError as error:
        raise CliError(str(error)) from error


def _verdict(failed: int, total: int) -> int:
    if failed:
        print(f"headrace: {failed} of {total} requests failed; their lines say why", file=sys.stderr)
        return Exit.USAGE
    return Exit.DONE


def read_text(file: Path) -> str:
    """A file of requests (`-`: standard input). Raises CliError."""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


def read_lines(text: str, folder: Path) -> Iterator[Line]:
    """The requests of a file of Headrace's own lines; a line that is none carries its error. Paths of images begin at
    `folder`."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            identifier, request = parse_line(line, folder)
            yield Line(number, identifier, request)
        except LineError as error:
            yield Line(number, None, None, f"line {number}: {error}")


@dataclass
class _Ordered:
    """Writes results in the order of the lines as soon as all before them are known."""

    out: TextIO
    lines: list[Line]
    _known: dict[int, dict[str, Any]] = field(default_factory=dict)
    _next: int = 0

    def put(self, index: int, result: dict[str, Any]) -> None:
        line = self.lines[index]
        self._known[index] = {"id": line.number if line.identifier is None else line.identifier, **result}
        while (ready := self._known.pop(self._next, None)) is not None:
            self.out.write(json.dumps(ready, ensure_ascii=False) + "\n")
            self._next += 1
        self.out.flush()


def run_lines(lines: list[Line], runner: OfflineRunner, out: TextIO) -> int:
    """Serve the lines; the number that failed."""
    writer = _Ordered(out, lines)
    failed = 0
    places: list[int] = []
    for index, line in enumerate(lines):
        if line.request is None:
            failed += 1
            writer.put(index, {"error": {"code": "INVALID_ARGUMENT", "message": line.error}})
        else:
            places.append(index)

    def on_result(at: int, result: Result) -> None:
        nonlocal failed
        failed += result.error is not None
        writer.put(places[at], result_document(result))

    requests = [line.request for line in lines if line.request is not None]
    with _bar(len(requests)) as (bar, task):
        runner.run(
            requests,
            on_result,
            lambda done, tokens: bar.update(task, completed=done, tokens=tokens),
        )
    return failed


def result_document(result: Result) -> dict[str, Any]:
    """The object of one result line, less its id."""
    if result.completion is None:
        error = result.error
        assert error is not None
        return {"error": {"code": _code(error), "message": error.message, "field": error.field or None}}
    done = result.completion
    rest = done.total_s - (done.first_token_s or 0)
    return {
        "seed": done.request.seed,
        "choices": [
            {
                "index": index,
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": None if choice.reason is None else choice.reason.value,
                "stop": choice.stop_match,
                "logprobs": [
                    {"token_id": one.token_id, "logprob": one.logprob, "top": [list(pair) for pair in one.top]}
                    for one in choice.logprobs
                ]
                or None,
            }
            for index, choice in enumerate(done.choices)
        ],
        "usage": {
            "prompt_tokens": done.request.prompt_length,
            "cached_tokens": done.counts.cached,
            "loaded_tokens": done.counts.loaded,
            "computed_tokens": done.counts.computed,
            "recomputed_tokens": done.counts.recomputed,
            "completion_tokens": done.completion_tokens,
            "image_tokens": sum(image.length for image in done.request.images),
        },
        "first_token_s": done.first_token_s,
        "total_s": done.total_s,
        "tokens_per_s": (done.completion_tokens - len(done.choices)) / rest if rest > 0 else None,
    }


def _code(error: HeadraceError) -> str:
    from headrace.v1 import common_pb2

    return common_pb2.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_")


@contextmanager
def _bar(total: int) -> Iterator[tuple[Progress, TaskID]]:
    with progress_bar(TextColumn("{task.fields[tokens]} tokens")) as bar:
        yield bar, bar.add_task("requests", total=total, tokens=0)


@contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    try:
        file = output.open("w", encoding="utf-8")
    except OSError as error:
        raise CliError(f"{output}: {error.strerror}") from error
    with file:
        yield file
