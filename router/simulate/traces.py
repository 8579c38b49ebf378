"""Readers of public request traces: when requests came, how long they were, which blocks of prefix they share.

| format | one row | ids |
|---|---|---|
| mooncake | JSON {timestamp: ms, input_length, output_length, hash_ids} | one per 512 tokens, last partial block too |
| v4flash (rtp-llm's log) | JSON {ts: ms, il, ol, bh, priority} | one per full 1,024 tokens |
| azure | CSV TIMESTAMP, ContextTokens, GeneratedTokens | none |

Other fields are ignored. Equal ids are equal prefixes up to and with that block.
"""

from __future__ import annotations

import csv
import enum
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

MOST_TIME = 1e15
"""Milliseconds: beyond any calendar."""
MOST_TOKENS = 1 << 40
MOST_ID = (1 << 63) - 1
"""Of a block."""


class TraceError(ValueError):
    """The file is not such a trace; says where and why."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}")
        self.path, self.line, self.reason = path, line, reason


class TraceFormat(enum.Enum):
    """How a trace file is written."""

    MOONCAKE = "mooncake"
    V4FLASH = "v4flash"
    AZURE = "azure"

    @property
    def block_tokens(self) -> int:
        """Tokens of one block id; 0: the format has none."""
        return {TraceFormat.MOONCAKE: 512, TraceFormat.V4FLASH: 1024, TraceFormat.AZURE: 0}[self]


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request."""

    at_s: float
    """Seconds from the first request of the trace."""
    prompt_tokens: int
    output_tokens: int
    """0: aborted before its first token."""
    blocks: tuple[int, ...] = ()
    """Ids of its prefix blocks, in order."""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of the file, which is that of time."""

    format: TraceFormat
    rows: Sequence[TraceRow]

    @property
    def block_tokens(self) -> int:
        return self.format.block_tokens

    @property
    def span_s(self) -> float:
        """From the first request to the last."""
        return self.rows[-1].at_s - self.rows[0].at_s if self.rows else 0.0

    @property
    def accesses(self) -> int:
        """Blocks over all requests."""
        return sum(len(row.blocks) for row in self.rows)

    @property
    def unique(self) -> int:
        """Distinct blocks."""
        return len({block for row in self.rows for block in row.blocks})

    def with_output(self) -> tuple[Trace, int]:
        """Without the requests that generated nothing, and how many those were."""
        kept = [row for row in self.rows if row.output_tokens > 0]
        return Trace(self.format, kept), len(self.rows) - len(kept)


def read_trace(path: Path, format_: TraceFormat | None = None) -> Trace:
    """Read a file, whose format shows in its first line if none is given. Raises TraceError for the first bad row (also
    for one that is earlier than the row before it), OSError for a file that cannot be opened."""
    rows: list[TraceRow] = []
    with path.open(encoding="utf-8", newline="") as lines:
        try:
            if format_ is None:
                format_ = _format_of(path, lines.readline())
                lines.seek(0)
            start = previous = 0.0
            for number, row in _READERS[format_](path, lines):
                if not rows:
                    start = previous = row.at_s
                if row.at_s < previous:
                    raise TraceError(path, number, f"it is {previous - row.at_s:g} s earlier than the row before it")
                previous = row.at_s
                rows.append(TraceRow(row.at_s - start, row.prompt_tokens, row.output_tokens, row.blocks, row.priority))
        except UnicodeDecodeError as error:  # somewhere in the buffer that begins with this line
            raise TraceError(path, len(rows) + 1, f"from here on it is no UTF-8 text ({error.reason})") from error
    if not rows:
        raise TraceError(path, 1, "the trace has no rows")
    return Trace(format_, rows)


def _format_of(path: Path, first: str) -> TraceFormat:
    if first.startswith("TIMESTAMP,"):
        return TraceFormat.AZURE
    try:
        fields = json.loads(first)
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict) and "hash_ids" in fields:
        return TraceFormat.MOONCAKE
    if isinstance(fields, dict) and "bh" in fields:
        return TraceFormat.V4FLASH
    raise TraceError(path, 1, "no known format: a row has hash_ids (mooncake) or bh (v4flash), a CSV begins TIMESTAMP")


Numbered = Iterator[tuple[int, TraceRow]]


def _mooncake(path: Path, lines: Iterator[str]) -> Numbered:
    for number, fields in _objects(path, lines):
        blocks = fields.get("hash_ids")
        if not isinstance(blocks, list) or not all(type(block) is int and 0 <= block <= MOST_ID for block in blocks):
            raise TraceError(path, number, "hash_ids is no list of non-negative 64-bit integers")
        row = TraceRow(
            _number(path, number, fields, "timestamp") / 1000,
            _count(path, number, fields, "input_length", 1),
            _count(path, number, fields, "output_length", 0),
            tuple(blocks),
        )
        _covers(path, number, row, -(-row.prompt_tokens // 512))
        yield number, row


def _v4flash(path: Path, lines: Iterator[str]) -> Numbered:
    ids: dict[str, int] = {}
    for number, fields in _objects(path, lines):
        hashes = fields.get("bh")
        if not isinstance(hashes, list) or not all(isinstance(name, str) for name in hashes):
            raise TraceError(path, number, "bh is no list of strings")
        row = TraceRow(
            _number(path, number, fields, "ts") / 1000,
            _count(path, number, fields, "il", 1),
            _count(path, number, fields, "ol", 0),
            tuple(ids.setdefault(name, len(ids)) for name in hashes),
            _count(path, number, {"priority": 0, **fields}, "priority", 0),
        )
        _covers(path, number, row, row.prompt_tokens // 1024)
        yield number, row


def _azure(path: Path, lines: Iterator[str]) -> Numbered:
    table = csv.DictReader(lines)
    while True:
        try:
            fields = next(table, None)
        except csv.Error as error:
            raise TraceError(path, table.line_num, f"no CSV ({error})") from error
        if fields is None:
            return
        number = table.line_num
        try:
            # Seven digits of a second, of which datetime takes six.
            moment, point, fraction = (fields["TIMESTAMP"] or "").partition(".")
            if point and not fraction.isdecimal():
                raise ValueError(f"a second has no fraction {_short(fraction)}")
            at_s = datetime.fromisoformat(f"{moment}+00:00").timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
            prompt, output = int(fields["ContextTokens"]), int(fields["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(path, number, f"no row of TIMESTAMP, ContextTokens, GeneratedTokens ({error})") from error
        if not 1 <= prompt <= MOST_TOKENS or not 0 <= output <= MOST_TOKENS:
            raise TraceError(path, number, f"{_short(prompt)} prompt and {_short(output)} generated tokens")
        yield number, TraceRow(at_s, prompt, output)


def _objects(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, object]]]:
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(path, number, f"no JSON ({error})") from error
        if not isinstance(fields, dict):
            raise TraceError(path, number, "no JSON object")
        yield number, fields


def _number(path: Path, line: int, fields: dict[str, object], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_TIME:
        raise TraceError(path, line, f"{name} is {_short(value)}, no time from 0 to {MOST_TIME:g} ms")
    return float(value)


def _count(path: Path, line: int, fields: dict[str, object], name: str, least: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= MOST_TOKENS:
        raise TraceError(path, line, f"{name} is {_short(value)}, no integer from {least} to {MOST_TOKENS}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _covers(path: Path, line: int, row: TraceRow, blocks: int) -> None:
    if len(row.blocks) != blocks:
        raise TraceError(path, line, f"{len(row.blocks)} block ids; {row.prompt_tokens} tokens have {blocks}")


_READERS: dict[TraceFormat, Callable[[Path, Iterator[str]], Numbered]] = {
    TraceFormat.MOONCAKE: _mooncake,
    TraceFormat.V4FLASH: _v4flash,
    TraceFormat.AZURE: _azure,
}
