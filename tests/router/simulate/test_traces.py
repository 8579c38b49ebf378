"""router.simulate.traces and generated: what is written is read again, and what is no trace is refused by line."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from headrace.router.simulate.generated import Shape, generate, write_trace
from headrace.router.simulate.traces import Trace, TraceError, TraceFormat, TraceRow, read_trace

SHAPE = Shape(requests=300, aborted=0.2)


@pytest.mark.parametrize("format_", TraceFormat)
def test_what_is_written_is_read_again(tmp_path: Path, format_: TraceFormat) -> None:
    path = tmp_path / "trace"
    trace = generate(SHAPE, 3, format_)
    write_trace(trace, path)
    read = read_trace(path)
    assert read.format is format_
    assert [(row.prompt_tokens, row.output_tokens, row.blocks, row.priority) for row in read.rows] == [
        (row.prompt_tokens, row.output_tokens, row.blocks, row.priority) for row in trace.rows
    ]
    assert [row.at_s for row in read.rows] == pytest.approx([row.at_s for row in trace.rows], abs=1e-6)
    assert read == read_trace(path, format_)
    kept, dropped = read.with_output()
    assert dropped == sum(row.output_tokens == 0 for row in trace.rows) > 20
    assert len(kept.rows) == SHAPE.requests - dropped


@pytest.mark.parametrize("format_", [TraceFormat.MOONCAKE, TraceFormat.V4FLASH])
def test_generated_traces_share_burst_and_have_tails(format_: TraceFormat) -> None:
    trace = generate(Shape(requests=2000), 1, format_)
    assert trace == generate(Shape(requests=2000), 1, format_)
    assert trace != generate(Shape(requests=2000), 2, format_)
    hits = 1 - trace.unique / trace.accesses
    assert 0.2 < hits < 0.6, "prefixes are shared"
    lengths = [row.prompt_tokens for row in trace.rows]
    assert max(lengths) > 8 * statistics.median(lengths), "a tail"
    assert len({row.at_s for row in trace.rows}) < 0.5 * len(lengths), "bursts"
    assert trace.span_s == pytest.approx(600, rel=0.2)


GOOD = '{"timestamp": 5, "input_length": 513, "output_length": 1, "hash_ids": [0, 1]}\n'


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "no known format"),
        ("{}\n", 1, "no known format"),
        (GOOD + "nonsense\n", 2, "no JSON"),
        (GOOD + "[]\n", 2, "no JSON object"),
        (GOOD + GOOD.replace("5,", "4,", 1), 2, "earlier"),
        (GOOD.replace("[0, 1]", "[0]"), 1, "have 2"),
        (GOOD.replace("[0, 1]", '[0, "1"]'), 1, "hash_ids"),
        (GOOD.replace("[0, 1]", "[0, true]"), 1, "hash_ids"),
        (GOOD.replace("513", "-1"), 1, "input_length"),
        (GOOD.replace('"output_length": 1, ', ""), 1, "output_length"),
        (GOOD.replace("5,", "NaN,", 1), 1, "timestamp"),
        (GOOD.replace("5,", "-5,", 1), 1, "timestamp"),
        ('{"ts": 1, "il": 1024, "ol": 0, "bh": [5]}\n', 1, "bh"),
        ('{"ts": 1, "il": 1024, "ol": 0, "bh": []}\n', 1, "have 1"),
        ('{"ts": 1, "il": 4, "ol": 0, "bh": [], "priority": "high"}\n', 1, "priority"),
        (GOOD.replace("5,", "1e300,", 1), 1, "timestamp"),
        (GOOD.replace("5,", f"{10**400},", 1), 1, "timestamp is 10"),
        (GOOD.replace('"output_length": 1', f'"output_length": {10**400}'), 1, "output_length is 10"),
        (GOOD + "[" * 200_000 + "\n", 2, "no JSON"),
        ("[" * 200_000, 1, "no known format"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9e999,4,3\r\n", 2, "no row"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + "x" * 200_000, 1, "no CSV"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n", 1, "no rows"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.97,x,3\r\n", 2, "no row"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.97,4\r\n", 2, "no row"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\r\nyesterday,4,3\r\n", 2, "no row"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.97,0,3\r\n", 2, "0 prompt"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(tmp_path: Path, text: str, line: int, reason: str) -> None:
    path = tmp_path / "wrong"
    path.write_bytes(text.encode())
    with pytest.raises(TraceError, match=reason) as refused:
        read_trace(path)
    assert refused.value.line == line
    assert f"{path}:{line}" in str(refused.value)


@pytest.mark.parametrize("before", [b"", GOOD.encode()])
def test_what_is_no_text_is_no_trace(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "wrong"
    path.write_bytes(before + b"\x80\xff" * 50_000)
    with pytest.raises(TraceError, match="no UTF-8 text"):
        read_trace(path)


def test_times_count_from_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.5,7,8",
        encoding="utf-8",
    )
    trace = read_trace(path)
    assert trace.rows[0] == TraceRow(0.0, 4808, 10)
    assert trace.rows[1].at_s == pytest.approx(1.52004, abs=1e-6)
    assert trace.block_tokens == 0
    assert Trace(TraceFormat.AZURE, ()).span_s == 0
