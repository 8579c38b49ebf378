"""Files of JSON lines that are continued: whole lines, torn tails, one writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.services.runtime.line_log import LineLog, LineLogError, read_log


def test_lines_survive_and_a_torn_tail_does_not(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    with LineLog(file) as log:
        log.append({"a": "ü\n"})
        log.append({"b": 1})
    with file.open("ab") as tail:
        tail.write(b'{"torn": ')
    assert read_log(file) == [{"a": "ü\n"}, {"b": 1}]
    with LineLog(file, lambda entry: "b" in entry) as log:
        assert list(log.entries) == [{"b": 1}]
        log.append({"c": 2})
    assert file.read_bytes() == b'{"b": 1}\n{"c": 2}\n'
    file.write_bytes(b'{"whole": 1}')
    with LineLog(file) as log:
        log.append({"c": 2})
    assert read_log(file) == [{"whole": 1}, {"c": 2}]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    with LineLog(file) as log:
        with pytest.raises(LineLogError, match="another process writes"):
            LineLog(file)
        log.append({"a": 1})
    with LineLog(file, lambda _: False), pytest.raises(LineLogError, match="another process writes"):
        LineLog(file)  # rewritten, and still held
    assert read_log(file) == []


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("dear diary\n{}\n")
    with pytest.raises(LineLogError, match="line 1 is no JSON object"):
        LineLog(file)
    assert file.read_text() == "dear diary\n{}\n"
