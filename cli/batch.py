"""`headrace offline` on batch files of the OpenAI API: a request a line in, a response a line out, in order of arrival.

Input   {"custom_id", "method": "POST", "url", "body"}
Output  {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null or {"code", "message"}}
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.cli.askers import Asker, Reply
from headrace.cli.batch_bodies import APIS, Asked, Conversion
from headrace.cli.exits import CliError, Exit
from headrace.cli.progress import progress_bar
from headrace.services.gateway.errors import body_of, status_of
from headrace.services.runtime.errors import HeadraceError, InvalidArgument
from headrace.services.runtime.line_log import Entry, LineLog, LineLogError, line_of

_KEYS: Final = frozenset({"custom_id", "method", "url", "body"})
Put = Callable[[Entry], None]


@dataclass(frozen=True)
class BatchLine:
    """One line of the file: a request, or the error that it has by itself."""

    custom_id: str | None
    url: str
    body: Any
    error: HeadraceError | None = None


def is_batch(text: str) -> bool:
    """Whether a file's first request has a custom_id or a body, which Headrace's own lines never have."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    try:
        entry = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and ("custom_id" in entry or "body" in entry)


def read_batch(text: str) -> list[BatchLine]:
    """All requests. Raises CliError where two lines have the same custom_id: their answers could not be told apart."""
    seen: dict[str, int] = {}
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        lines.append(_line(line, number))
        name = lines[-1].custom_id
        if name is not None and seen.setdefault(name, number) != number:
            raise CliError(f"line {number}: custom_id {name!r} is that of line {seen[name]}, too")
    return lines


def _line(text: str, number: int) -> BatchLine:
    custom_id, url, body = None, "", None
    try:
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"line {number} is no JSON: {error}") from None
        if not isinstance(entry, dict):
            raise InvalidArgument(f"line {number} is no JSON object")
        if not isinstance(entry.get("custom_id"), str):
            raise InvalidArgument(f"line {number} needs one, a string", field="custom_id")
        custom_id, url, body = entry["custom_id"], str(entry.get("url")), entry.get("body")
        for name in sorted(entry.keys() - _KEYS):
            raise InvalidArgument("is no key of a batch line", field=name)
        if entry.get("method", "POST") != "POST":
            raise InvalidArgument("must be POST", field="method")
        return BatchLine(custom_id, url, body)
    except HeadraceError as error:
        return BatchLine(custom_id, url, body, error)


def is_answer(entry: Entry) -> bool:
    """Whether a line of the output need not be asked again."""
    response = entry.get("response")
    return isinstance(response, dict) and response.get("status_code") == 200


def answered_ids(entries: Sequence[Entry]) -> set[str]:
    """What an earlier run has answered."""
    return {str(entry.get("custom_id")) for entry in entries if is_answer(entry)}


def run_batch(
    lines: Sequence[BatchLine], done: set[str], opened: Callable[[], tuple[Asker, Conversion]], put: Put
) -> int:
    """Answer the lines that are not in `done`; how many failed. `opened` is called if there is anything to ask."""
    left = [line for line in lines if line.custom_id is None or line.custom_id not in done]
    failed = 0

    def fail(line: BatchLine, error: HeadraceError) -> None:
        nonlocal failed
        failed += 1
        put(error_entry(line, error))

    for line in left:
        if line.error is not None:
            fail(line, line.error)
    left = [line for line in left if line.error is None]
    if not left:
        return failed
    asker, conversion = opened()
    todo: list[tuple[BatchLine, Asked]] = []
    for line in left:
        try:
            todo.append((line, conversion.asked(line.url, line.body)))
        except HeadraceError as error:
            fail(line, error)
    if not todo:
        return failed
    with progress_bar() as bar:
        task = bar.add_task("requests", total=len(lines), completed=len(lines) - len(todo))

        def settle(index: int, outcome: Reply | HeadraceError) -> None:
            line, asked = todo[index]
            try:
                if isinstance(outcome, HeadraceError):
                    raise outcome
                put(answer_entry(line, outcome.request_id, asked.response(outcome.events)))
            except HeadraceError as error:
                fail(line, error)
            bar.advance(task)

        asker.ask([asked.request for _, asked in todo], settle)
    return failed


def answer_entry(line: BatchLine, request_id: str, body: dict[str, Any]) -> Entry:
    """The output line of a good answer."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": _new_id(), "custom_id": line.custom_id, "response": response, "error": None}


def error_entry(line: BatchLine, error: HeadraceError) -> Entry:
    """The output line of a failure: the gateway's status and error body, and code and message once more."""
    body = body_of(error, "openai", "", APIS.get(line.url, ""))
    code = body["error"]["code"] or body["error"]["type"]
    return {
        "id": _new_id(),
        "custom_id": line.custom_id,
        "response": {"status_code": status_of(error), "request_id": None, "body": body},
        "error": {"code": code, "message": body["error"]["message"]},
    }


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


@contextmanager
def opened(output: Path | None) -> Iterator[tuple[set[str], Put]]:
    """(answered already, where lines go). A file keeps its answers and is appended to; a pipe has none. Raises
    CliError, also when a line cannot be written."""
    if output is None:
        yield set(), _put_on_standard_output
        return
    try:
        file = LineLog(output, is_answer) if output.is_file() or not output.exists() else output.open("ab", buffering=0)
    except (LineLogError, OSError) as error:
        raise CliError(str(error)) from error
    with file:

        def put(entry: Entry) -> None:
            try:
                if isinstance(file, LineLog):
                    file.append(entry)
                else:
                    file.write(line_of(entry))
            except OSError as error:
                raise CliError(f"{output}: {error.strerror}", Exit.FAILED) from error

        yield answered_ids(file.entries) if isinstance(file, LineLog) else set(), put


def _put_on_standard_output(entry: Entry) -> None:
    sys.stdout.write(line_of(entry).decode())
    sys.stdout.flush()
