"""router.native.build: without a compiler, or with one that fails, the reason is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.compiler import NativeUnavailable
from headrace.router.native.build import load_native

load_anew = load_native.__wrapped__


def test_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python decides then; nothing is silent (L12)."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    with pytest.raises(NativeUnavailable, match="does not run"):
        load_anew()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match="install"):
        load_anew()


def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next start tries again."""
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho broken >&2\nexit 1\n', encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeUnavailable, match="broken"):
        load_anew()
    assert not list((tmp_path / "cache" / "native").glob("*.so"))
