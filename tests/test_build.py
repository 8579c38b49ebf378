"""build.sh: its verbs, and what it refuses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build(*arguments: str, script: Path = ROOT / "build.sh", **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "HEADRACE_VENV"}
    return subprocess.run(
        [str(script), *arguments], env={**kept, **environment}, capture_output=True, text=True, check=False
    )


def test_help_names_every_verb() -> None:
    done = build("--help")
    assert done.returncode == 0
    assert [
        verb for verb in ("setup", "demo", "test", "lint", "proto", "bench") if f"\n  {verb}" not in done.stdout
    ] == []


def test_unknown_verb_fails() -> None:
    done = build("sing")
    assert done.returncode == 1
    assert "no verb sing" in done.stderr
    assert done.stdout == ""


def fake_python(path: Path, minor: int, modules: str) -> Path:
    """An interpreter of version 3.`minor` that can import `modules` only, as far as build.sh asks."""
    path.write_text(
        f"""#!/usr/bin/env bash
case "$*" in
    *"sys.version_info <"*) exit 0 ;;
    *"sys.version_info.minor"*) echo {minor} ;;
    *"import torch"*) [[ "{modules}" == *torch* ]] && echo 2.13.0 ;;
    -VV) echo "Python 3.{minor} (fake)" ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""
    )
    path.chmod(0o755)
    return path


def test_a_later_python_without_torch_is_refused(tmp_path: Path) -> None:
    for name in ("build.sh", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "build.sh").chmod(0o755)
    python = fake_python(tmp_path / "python", minor=12, modules="")
    done = build("lint", script=tmp_path / "build.sh", PYTHON=str(python))
    assert done.returncode == 1
    assert "has no torch" in done.stderr
    assert not (tmp_path / ".venv").exists()
