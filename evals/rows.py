"""Rows of a data file as published: JSON lines, a JSON array, CSV or Parquet."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.evals.errors import EvalError, file_errors

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def read_rows(path: Path) -> list[Row]:
    """All rows, in the file's order. Raises EvalError for a file that cannot be read as its suffix says."""
    try:
        match path.suffix.lower():
            case ".jsonl":
                rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            case ".json":
                rows = json.loads(path.read_text(encoding="utf-8"))
            case ".csv":
                with path.open(encoding="utf-8-sig", newline="") as file:
                    rows = list(csv.DictReader(file))
            case ".parquet":
                rows = _parquet(path)
            case other:
                raise EvalError(f"{path}: {other or 'no suffix'}; {', '.join(SUFFIXES)} are read")
    except OSError as error:
        raise EvalError(f"{path}: {error.strerror or error}") from error
    except (ValueError, csv.Error) as error:
        if isinstance(error, EvalError):
            raise
        raise EvalError(f"{path}: {error}") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise EvalError(f"{path}: holds no rows")
    return rows


def _parquet(path: Path) -> list[Row]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise EvalError(f"{path}: Parquet needs pyarrow: pip install 'headrace[evals]'") from None
    rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hex. Raises EvalError."""
    with file_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def field(row: Row, path: Path, *names: str) -> str:
    """The first of `names` that the row has, as text. Raises EvalError that names what there is."""
    for name in names:
        value = row.get(name)
        if value is not None and str(value).strip():
            return str(value).strip()
    there = ", ".join(map(str, row)) or "nothing"
    raise EvalError(f"{path}: a row has no {' or '.join(map(repr, names))}; it has {there}")
