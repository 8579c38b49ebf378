"""`headrace offline`: a file of requests answered in this process; results are JSON lines in the requests' order."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from rich.progress import Progress, TaskID, TextColumn

from headrace.cli.exits import CliError, Exit
from headrace.cli.progress import progress_bar
from headrace.cli.request_line import LineError, parse_line
from headrace.services.runtime.errors import HeadraceError
from headrace.services.runtime.memory import read_budget

if TYPE_CHECKING:
    from headrace.cli.offline_engine import OfflineRunner, Result
    from headrace.v1 import inference_pb2

MEMORY_FRACTION: Final = 0.8
KV_SHARE: Final = 0.65
"""Of what is left of the host's memory after the weights (L29); the rest is for spilled sequences and activations."""
BASE_BYTES: Final = 512 << 20
SHARED_WEIGHTS: Final = 64 << 20
"""Models below this size run on one thread unless told otherwise: their operators are shorter than the wait of one
thread for another, which on a busy machine made V4.1-tiny a hundred times slower with two."""


@dataclass
class Line:
    """One line of the file."""

    number: int
    identifier: str | int | None
    request: inference_pb2.GenerateRequest | None
    error: str = ""


def offline(folder: Path, file: Path, output: Path | None, threads: int, config: Path | None, sets: list[str]) -> int:
    """Run the file; the exit status. Raises CliError for what is wrong before the first request."""
    lines = list(read_lines(file))
    runner = load_runner(folder, threads, config, sets)
    with _opened(output) as out:
        failed = run_lines(lines, runner, out)
    if failed:
        print(f"headrace: {failed} of {len(lines)} requests failed; their lines say why", file=sys.stderr)
        return Exit.USAGE
    return Exit.DONE


def load_runner(
    folder: Path, threads: int = 0, config: Path | None = None, sets: list[str] | None = None
) -> OfflineRunner:
    """The model with the settings that the folder, a file and flags give. Raises CliError."""
    from headrace.cli.offline_engine import OfflineRunner, OfflineSettings
    from headrace.engine.loading import ModelError
    from headrace.engine.sizing import TooLittleMemory
    from headrace.engine.text.errors import TextError
    from headrace.services.runtime.settings_load import SettingsError, load

    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    rest = int(read_budget().available_bytes * MEMORY_FRACTION) - weights - BASE_BYTES
    derived = [
        f"model.folder={folder}",
        f"model.name={folder.name}",
        f"engine.kv_bytes={max(1, int(rest * KV_SHARE))}",
        f"engine.threads={threads or (1 if weights < SHARED_WEIGHTS else len(os.sched_getaffinity(0)))}",
        "log.level=warning",
    ]
    try:
        return OfflineRunner(load(OfflineSettings, config, [*derived, *(sets or [])]), folder)
    except (SettingsError, ModelError, TooLittleMemory, TextError) as error:
        raise CliError(str(error)) from error


def read_lines(file: Path) -> Iterator[Line]:
    """The requests of a file (`-`: standard input); a line that is none carries its error. Raises CliError."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    folder = Path() if str(file) == "-" else file.parent
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
