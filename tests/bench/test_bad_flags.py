"""Every benchmark tells a bad flag in one line of its usage, before it measures anything."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

NO_TRACE = "no trace of anybody\n"


@pytest.mark.parametrize(
    ("bench", "flags", "says"),
    [
        ("routing", ("--trace", "nowhere"), "nowhere: no such file"),
        ("routing", ("--trace", "FILE"), "no known format"),
        ("routing", ("--trace", "FILE", "--workers", "0"), "0 is below 1"),
        ("retention", ("--trace", "FILE"), "file:1: "),
        ("experts", ("--routing", "FILE"), "is no npz file"),
        ("experts", ("--routing", "FILE", "--ep", "eight"), "invalid positive value"),
        ("store", ("--rounds", "-1"), "-1 is below 1"),
    ],
)
def test_a_bad_flag_is_one_line(
    bench: str, flags: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_text(NO_TRACE)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"bench.{bench}").main([str(path) if flag == "FILE" else flag for flag in flags])
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    assert says in last
