"""What every benchmark prints: one JSON object with ``--json``, else a table; the machine and versions in both.

A bench module is a ``main`` of four lines: parse with ``arguments``, measure, build a ``Report``, ``emit`` it. Field
names of a report are part of the contract of the issue that asks for them; times are reported, never asserted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

Scalar = str | int | float | bool | None
JsonValue = Scalar | Sequence["JsonValue"] | dict[str, "JsonValue"]

PACKAGES = ("torch", "numpy", "grpcio", "protobuf", "nixl-cu12", "nixl-cu13", "transformers", "xgrammar", "llguidance")
"""Whose versions explain a figure; the ones not installed are left out."""


@dataclass(frozen=True)
class Report:
    """Result of one benchmark."""

    name: str
    """Module name under bench/, e.g. ``transfer``."""
    results: dict[str, JsonValue]
    """Top-level fields of the JSON object; the quoted names of the issue stand here."""
    table: Sequence[dict[str, Scalar]] = field(default=())
    """Rows of the printed table (same keys in each); also in the JSON object, as ``rows``."""
    notes: Sequence[str] = field(default=())
    """One sentence each: what a figure means, what was left out and why."""

    def to_json(self) -> str:
        """One line. ``bench``, ``machine``, ``versions`` come first, then the results, ``rows`` and ``notes``."""
        document: dict[str, JsonValue] = {"bench": self.name, "machine": machine(), "versions": versions()}
        clash = (document.keys() | {"rows", "notes"}) & self.results.keys()
        if clash:
            raise ValueError(f"result fields {sorted(clash)} are the report's own; rename them")
        document |= self.results
        if self.table:
            document["rows"] = [dict(row) for row in self.table]
        if self.notes:
            document["notes"] = list(self.notes)
        return json.dumps(document, allow_nan=False)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Parser with ``--json``; the bench adds its own flags. ``doc`` is the module's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def positive(text: str) -> int:
    """A flag's whole number, 1 or more. Raises what argparse tells in one line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def existing(text: str) -> Path:
    """A flag's file or folder. Raises what argparse tells in one line."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or folder")
    return path


def emit(report: Report, *, as_json: bool) -> None:
    """Print the report. JSON goes alone to stdout, so that it can be piped; progress belongs on stderr."""
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    about = machine()
    console.print(f"[bold]{report.name}[/bold]  {about['cpu']}, {about['cores']} cores, {about['memory_gb']} GB")
    console.print("  ".join(f"{package} {version}" for package, version in versions().items()), style="dim")
    if report.table:
        table = Table()
        for column in report.table[0]:
            numeric = all(isinstance(row[column], int | float) for row in report.table)
            table.add_column(column, justify="right" if numeric else "left")
        for row in report.table:
            table.add_row(*(_cell(value) for value in row.values()))
        console.print(table)
    for name, value in report.results.items():
        if not isinstance(value, dict | list | tuple):
            console.print(f"{name} = {_cell(value)}")
    for note in report.notes:
        console.print(f"- {note}", style="dim")


def machine() -> dict[str, JsonValue]:
    """Host as the process sees it: cores it may run on, memory, GPUs when torch is loaded and sees any."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    about: dict[str, JsonValue] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        about["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return about


def versions() -> dict[str, JsonValue]:
    """Installed versions of PACKAGES."""
    found: dict[str, JsonValue] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _cell(value: JsonValue) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
