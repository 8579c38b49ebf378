"""The secret of a local store: drawn once, for one user (L25)."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from headrace.cli.exits import CliError
from headrace.cli.store_secret import SECRET_FILE, store_secret


def test_it_is_drawn_once(tmp_path: Path) -> None:
    """A later run with the folder derives the same keys; nothing else is left in it."""
    folder = tmp_path / "made" / "store"
    secret = store_secret(folder)
    assert len(secret) == 64
    assert store_secret(folder) == secret
    assert [path.name for path in folder.iterdir()] == [SECRET_FILE]
    assert stat.S_IMODE((folder / SECRET_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert store_secret(tmp_path / "other") != secret


def test_a_secret_that_others_can_read_is_none(tmp_path: Path) -> None:
    """It is refused with what to do."""
    store_secret(tmp_path)
    (tmp_path / SECRET_FILE).chmod(0o644)
    with pytest.raises(CliError, match="chmod 600"):
        store_secret(tmp_path)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """Not a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CliError, match="cannot be used"):
        store_secret(tmp_path / "file" / "store")
