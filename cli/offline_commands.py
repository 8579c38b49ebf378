"""The flags of `headrace offline`, and those that all commands share which ask many requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.exits import CliError

if TYPE_CHECKING:
    from headrace.cli.sources import Source

Model = Annotated[
    str | None,
    typer.Option("--model", metavar="FOLDER|NAME", help="Answer in this process: a folder, or a name of `model list`."),
]
Router = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Ask this cluster; without --model the default is your running `up`'s."),
]
Folder = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER|NAME",
        help="Of another's cluster, for a batch file: its model's folder, of which tokenizer and template are read.",
    ),
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="HEADRACE_API_KEY", show_envvar=False, help="Default: $HEADRACE_API_KEY.")
]
Name = Annotated[str | None, typer.Option(help="With --model: its name in requests; default: the folder's.")]
Concurrency = Annotated[int, typer.Option(min=1, max=1024, help="With a cluster: most requests under way.")]
Timeout = Annotated[float, typer.Option(min=0.001, max=86_400, help="With a cluster: seconds for each request.")]
Device = Annotated[str, typer.Option(help="With --model: cpu, cuda, cuda:1 …")]
Dtype = Annotated[str | None, typer.Option(help="With --model: float32 or bfloat16; default: the folder's.")]
Threads = Annotated[int, typer.Option(min=0, help="With --model: CPU threads; 0: all cores, or one for tiny models.")]
Config = Annotated[Path | None, typer.Option(help="With --model: a TOML file of settings.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="With --model: section.field=value. Repeatable."),
]


def source_of(
    model: str | None,
    router: str | None,
    api_key: str | None,
    name: str | None,
    concurrency: int,
    timeout: float,
    device: str,
    dtype: str | None,
    threads: int,
    config: Path | None,
    sets: list[str] | None,
) -> Source:
    """Who is to answer. Raises CliError."""
    from headrace.cli.model_folder import find_model
    from headrace.cli.sources import Source

    if model is not None and router is not None:
        raise CliError("give --model or --router: the one answers here, the other asks a cluster")
    derived = [f"load.device={device}", *([] if dtype is None else [f"load.dtype={dtype}"])]
    return Source(
        folder=None if model is None else find_model(model, dtype),
        router=router,
        name=name,
        threads=threads,
        config=config,
        sets=(*derived, *(sets or [])),
        api_key=api_key,
        concurrency=concurrency,
        timeout_s=timeout,
    )


def offline(
    file: Annotated[Path, typer.Argument(help="One request per line, as JSON (docs/cli.md); `-` is standard input.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: standard output. A batch file's is continued.")
    ] = None,
    model: Model = None,
    router: Router = None,
    folder: Folder = None,
    api_key: ApiKey = None,
    name: Name = None,
    concurrency: Concurrency = 32,
    timeout: Timeout = 600.0,
    device: Device = "cpu",
    dtype: Dtype = None,
    threads: Threads = 0,
    config: Config = None,
    sets: Sets = None,
) -> None:
    """Answer a file of requests: Headrace's own lines, or a batch file of the OpenAI API."""
    from headrace.cli.model_folder import find_model
    from headrace.cli.offline import offline

    source = source_of(model, router, api_key, name, concurrency, timeout, device, dtype, threads, config, sets)
    if folder is not None:
        source = replace(source, text_folder=find_model(folder, dtype))
    raise typer.Exit(offline(source, file, output))
