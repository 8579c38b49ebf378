"""A folder of golden cases and one case of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

Tensors = Mapping[str, torch.Tensor]
Tolerance = str | dict[str, float]


class GoldenFormatError(ValueError):
    """The folder is not in the golden format, or holds a form that this harness does not know."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a case, as the manifest describes it."""

    key: str
    """``family/case/in|w|out.name``; may belong to another case (shared tensors)."""
    dtype: str
    shape: tuple[int, ...]
    cast_to: str | None
    tolerance: Tolerance | None


class TensorFiles:
    """The family files of a folder, opened when first read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def read(self, entry: Entry) -> torch.Tensor:
        """The tensor, widened where the manifest says so."""
        tensor = self.read_stored(entry)
        return tensor if entry.cast_to is None else tensor.to(_dtype(entry.cast_to))

    def read_stored(self, entry: Entry) -> torch.Tensor:
        """The tensor as the file holds it."""
        family = entry.key.split("/", 1)[0]
        if family not in self._open:
            self._open[family] = safe_open(str(self._folder / f"{family}.safetensors"), framework="pt")
        tensor: torch.Tensor = self._open[family].get_tensor(entry.key)
        return tensor


@dataclass(frozen=True)
class Case:
    """One golden case. Tensors are read on request."""

    name: str
    config: Mapping[str, Any]
    checks: str
    inputs: Mapping[str, Entry]
    weights: Mapping[str, Entry]
    outputs: Mapping[str, Entry]
    checkpoint: Path | None
    """Folder of the checkpoint that composed cases run on."""
    files: TensorFiles

    @property
    def family(self) -> str:
        return self.name.split("/", 1)[0]

    @property
    def short_name(self) -> str:
        return self.name.split("/", 1)[1]

    def input(self, name: str) -> torch.Tensor:
        return self.files.read(self.inputs[name])

    def weight(self, name: str) -> torch.Tensor:
        return self.files.read(self.weights[name])

    def expected(self, name: str) -> torch.Tensor:
        return self.files.read(self.outputs[name])

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer of the config."""
        return int(self._value(name, default))

    def number(self, name: str, default: float | None = None) -> float:
        """A number of the config."""
        return float(self._value(name, default))

    def _value(self, name: str, default: float | None) -> Any:
        value = self.config.get(name, default)
        if value is None:
            raise GoldenFormatError(f"case {self.name} has no {name} in its config")
        return value


def load_cases(folder: Path) -> list[Case]:
    """Every case of ``folder``, in the manifest's order."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise GoldenFormatError(f"{folder} has no manifest.json: give a folder in the golden format with --dir")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("format") != 1:
        raise GoldenFormatError(f"{path} has format {manifest.get('format')!r}; this harness reads format 1")
    files = TensorFiles(folder)
    return [_case(raw, manifest.get("checkpoint"), folder, files) for raw in manifest["cases"]]


def _case(raw: Mapping[str, Any], default_checkpoint: str | None, folder: Path, files: TensorFiles) -> Case:
    checkpoint = raw["config"].get("checkpoint", default_checkpoint)
    return Case(
        name=raw["case"],
        config=raw["config"],
        checks=raw.get("checks", ""),
        inputs=_entries(raw["inputs"]),
        weights=_entries(raw["weights"]),
        outputs=_entries(raw["outputs"]),
        checkpoint=folder / checkpoint if checkpoint else None,
        files=files,
    )


def _entries(raw: Mapping[str, Any]) -> dict[str, Entry]:
    return {
        name: Entry(entry["key"], entry["dtype"], tuple(entry["shape"]), entry.get("cast_to"), entry.get("tol"))
        for name, entry in raw.items()
    }


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise GoldenFormatError(f"unknown dtype {name!r}")
    return dtype
