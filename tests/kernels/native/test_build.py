"""Where the library cannot be had the reason is said, and a model falls back to torch in the open."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import compiler
from headrace.kernels.native import build


def test_no_compiler_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names what to install."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    with pytest.raises(compiler.NativeUnavailable, match=r"install g\+\+"):
        build.load_native.__wrapped__()


def test_a_failing_compiler_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the compiler said is in the message; nothing half-built is left."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(compiler.NativeUnavailable, match="failed"):
        build.load_native.__wrapped__()
    assert not list(tmp_path.rglob("*.so"))


def test_the_name_covers_the_sources(tmp_path: Path) -> None:
    """A changed source is another library."""
    (tmp_path / "unit.cpp").write_text("// one")
    before = compiler.source_digest(tmp_path, "true", ())
    (tmp_path / "unit.cpp").write_text("// other")
    assert compiler.source_digest(tmp_path, "true", ()) != before
