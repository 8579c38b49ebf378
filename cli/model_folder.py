"""From what a user names a model by to its folder. Reads no weights."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.exits import CliError
from headrace.engine.folders import models_directory


def is_model_folder(path: Path) -> bool:
    return (path / "config.json").is_file()


def list_model_folders(directory: Path | None = None) -> list[Path]:
    """Model folders in the models directory, by name."""
    directory = directory or models_directory()
    return sorted(path for path in directory.glob("*") if not path.name.startswith(".") and is_model_folder(path))


def find_model(name: str, dtype: str | None = None) -> Path:
    """A path to a folder, or a name in the models directory, where `smollm2` is `smollm2-bfloat16` or the folder of the
    wanted dtype. Raises CliError that says what there is and how to get what is not."""
    path = Path(name)
    if is_model_folder(path):
        return path.resolve()
    if path.is_dir():
        raise CliError(f"{path} is no model folder: it has no config.json")
    directory = models_directory()
    for candidate in (name, f"{name}-{dtype or 'bfloat16'}", f"{name}-float32"):
        if "/" not in name and is_model_folder(directory / candidate):
            return (directory / candidate).resolve()
    there = ", ".join(folder.name for folder in list_model_folders(directory)) or "none"
    hint = ""
    if name.startswith("smollm2"):
        hint = "; `headrace model fetch smollm2` gets it"
    elif name.startswith("deepseek-v41-tiny"):
        hint = "; `headrace model make deepseek-v41-tiny` makes it"
    raise CliError(f"no model {name!r}: no such folder, and {directory} has {there}{hint}")
