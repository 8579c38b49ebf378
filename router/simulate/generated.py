"""Traces of our own in the public formats, for tests: the same kinds of sharing, bursts and length tails.

Chats extend their own prompts turn by turn; documents are asked about by several requests at once; the rest shares a
system prompt alone. Arrivals come in bursts on coarse time stamps; lengths are lognormal with a long tail.
"""

from __future__ import annotations

import csv
import json
import math
import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from headrace.router.simulate.traces import Trace, TraceFormat, TraceRow

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
"""Time of the first row of a generated CSV."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a generated trace is like; lengths in blocks of 512 tokens."""

    requests: int = 1000
    span_s: float = 600.0
    median_blocks: float = 12.0
    spread: float = 1.0
    """Standard deviation of the logarithm of lengths."""
    longest_blocks: int = 250
    median_output: float = 300.0
    chats: float = 0.3
    """Share of requests that continue a chat."""
    turns: float = 4.0
    """Mean turns of a chat."""
    documents: float = 0.05
    """Share of requests that ask about a document which several ask about."""
    system_blocks: int = 1
    systems: int = 1
    burst: float = 4.0
    """Mean requests that come together."""
    aborted: float = 0.0
    """Share of requests without output."""


@dataclass
class _Chat:
    blocks: list[int]
    turns_left: int


class _Maker:
    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.chance = random.Random(seed)
        self.fresh = shape.systems * shape.system_blocks
        self.chats: list[_Chat] = []
        self.documents: list[list[int]] = []

    def take(self, count: int) -> list[int]:
        self.fresh += count
        return list(range(self.fresh - count, self.fresh))

    def length(self, median: float) -> int:
        drawn = self.chance.lognormvariate(math.log(median), self.shape.spread)
        return max(1, min(self.shape.longest_blocks, round(drawn)))

    def start(self) -> list[int]:
        system = self.chance.randrange(self.shape.systems) * self.shape.system_blocks
        return list(range(system, system + self.shape.system_blocks))

    def prompt(self) -> list[int]:
        """Full blocks of a prompt; the last, partial one is the caller's."""
        shape, chance = self.shape, self.chance
        kind = chance.random()
        if kind < shape.chats:
            if not self.chats or chance.random() < 1 / shape.turns:
                self.chats.append(_Chat(self.start(), 1 + int(chance.expovariate(1 / shape.turns))))
            chat = chance.choice(self.chats[-64:])
            chat.blocks += self.take(self.length(shape.median_blocks / 3))
            chat.turns_left -= 1
            if chat.turns_left <= 0 or len(chat.blocks) > shape.longest_blocks:
                self.chats.remove(chat)
            return list(chat.blocks)
        if kind < shape.chats + shape.documents:
            if not self.documents or chance.random() < 0.2:
                self.documents.append(self.start() + self.take(self.length(3 * shape.median_blocks)))
            return list(chance.choice(self.documents[-4:]))
        return self.start() + self.take(self.length(shape.median_blocks) - 1)


def generate(shape: Shape, seed: int, format_: TraceFormat = TraceFormat.MOONCAKE) -> Trace:
    """The same trace for the same shape and seed."""
    maker = _Maker(shape, seed)
    chance = maker.chance
    rows: list[TraceRow] = []
    names: dict[int, int] = {}
    at = 0
    while len(rows) < shape.requests:
        for _ in range(1 + int(chance.expovariate(1 / max(shape.burst - 1, 1e-9)))):
            blocks = maker.prompt()
            partial = chance.randrange(512)
            tokens = len(blocks) * 512 + partial
            output = max(1, round(chance.lognormvariate(math.log(shape.median_output), shape.spread)))
            if chance.random() < shape.aborted:
                output = 0
            if format_ is TraceFormat.MOONCAKE and partial:
                blocks = [*blocks, maker.take(1)[0]]
            ids: list[int] = []
            if format_ is TraceFormat.MOONCAKE:
                ids = blocks
            elif format_ is TraceFormat.V4FLASH:  # a pair of blocks is one of theirs; its second half names it
                ids = [blocks[2 * pair + 1] for pair in range(tokens // 1024)]
            numbers = tuple(names.setdefault(block, len(names)) for block in ids)
            priority = chance.choice((30, 50, 50, 50, 70)) if format_ is TraceFormat.V4FLASH else 0
            rows.append(TraceRow(at / 1000, tokens, output, numbers, priority))
        # Whole milliseconds, as the files have them.
        at += max(1, round(1000 * chance.expovariate(shape.requests / shape.burst / shape.span_s)))
    return Trace(format_, rows[: shape.requests])


def write_trace(trace: Trace, path: Path) -> None:
    """In the trace's own format, so that `read_trace` gives it back."""
    with path.open("w", encoding="utf-8", newline="") as out:
        if trace.format is TraceFormat.AZURE:
            table = csv.writer(out, lineterminator="\r\n")
            table.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
            for row in trace.rows:
                moment = FIRST + timedelta(seconds=row.at_s)
                stamp = f"{moment:%Y-%m-%d %H:%M:%S.%f}0"
                table.writerow((stamp, row.prompt_tokens, row.output_tokens))
            return
        for row in trace.rows:
            out.write(json.dumps(_fields(trace.format, row)) + "\n")


def _fields(format_: TraceFormat, row: TraceRow) -> dict[str, object]:
    ms = round(row.at_s * 1000)
    if format_ is TraceFormat.MOONCAKE:
        return {
            "timestamp": ms,
            "input_length": row.prompt_tokens,
            "output_length": row.output_tokens,
            "hash_ids": list(row.blocks),
        }
    hashes = [str((block + 1) * 0x9E3779B97F4A7C15 % 2**64) for block in row.blocks]
    return {"ts": ms, "il": row.prompt_tokens, "ol": row.output_tokens, "bh": hashes, "priority": row.priority}
