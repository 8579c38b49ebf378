"""The program itself: help is quick, errors of users are one line with a documented status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import main as program
from headrace.cli.exits import Exit

HELP = """
import sys
from headrace.cli.main import main
sys.argv = ["headrace", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("LOADED", *sorted({"torch", "grpc", "google.protobuf", "numpy", "tokenizers"} & set(sys.modules)))
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setenv("HEADRACE_MODELS", str(tmp_path / "models"))
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", HELP, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED"
    assert "--replicas" in done.stdout or "generate" in done.stdout


def run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
    with pytest.raises(SystemExit) as end:
        program.main()
    out, err = capsys.readouterr()
    code = end.value.code
    return (code if isinstance(code, int) else 0), out, err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["status"], Exit.UNREACHABLE, "no cluster of yours runs here"),
        (["status", "--router", "127.0.0.1:1"], Exit.UNREACHABLE, "nobody answers at 127.0.0.1:1"),
        (["generate", "hi", "--router", "127.0.0.1:1"], Exit.UNREACHABLE, "nobody answers at 127.0.0.1:1"),
        (["generate", "hi", "--image", "/nowhere.png", "--router", "127.0.0.1:1"], Exit.USAGE, "/nowhere.png: No such"),
        (["up", "--model", "nothing"], Exit.USAGE, "no model 'nothing'"),
        (["up", "--model", "smollm2"], Exit.USAGE, "`headrace model fetch smollm2` gets it"),
        (["up", "--model", "/"], Exit.USAGE, "/ is no model folder"),
        (["serve", "cook"], Exit.USAGE, "serve 'cook': no such role"),
        (["serve", "router"], Exit.USAGE, "model.folder is needed"),
        (["serve", "router", "--set", "x.y=1"], Exit.USAGE, "x (--set x.y): unknown key"),
        (["serve", "router", "--config", "/nowhere.toml"], Exit.USAGE, "cannot read /nowhere.toml"),
        (["model", "make", "gpt"], Exit.USAGE, "can make deepseek-v41-tiny"),
        (["model", "fetch", "gpt"], Exit.USAGE, "can fetch smollm2"),
        (["offline", "--model", "nothing", "x.jsonl"], Exit.USAGE, "no model 'nothing'"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    status: Exit,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = run(arguments, monkeypatch, capsys)
    assert code == status, err
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("headrace: ")


def test_an_empty_models_directory_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["model", "list"], monkeypatch, capsys)
    assert code == 0
    assert "has no models" in " ".join(out.split())
