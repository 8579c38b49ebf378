"""Flags that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="section.field=value (docs/settings.md). Repeatable."),
]
Config = Annotated[Path | None, typer.Option(help="A TOML file of settings.")]
Router = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="The router; default: that of your running `headrace up`.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="HEADRACE_API_KEY",
        show_envvar=False,
        help="Who you are; default: $HEADRACE_API_KEY, which ps does not show.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
