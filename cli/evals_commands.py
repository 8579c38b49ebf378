"""The flags of `headrace evals …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.flags import Json
from headrace.cli.offline_commands import (
    ApiKey,
    Concurrency,
    Config,
    Device,
    Dtype,
    Model,
    Name,
    Router,
    Sets,
    Threads,
    Timeout,
    source_of,
)

app = typer.Typer(
    name="evals",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Ask a model the questions of a data set, and grade what it has answered; the two are apart.",
)
Folder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]


@app.command()
def run(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="SET",
            help="samples or arithmetic, facts, instructions, extraction; with --data aime-2026, gpqa-diamond, hle.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="RUN", help="The run's folder; one that is there goes on.")
    ],
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="The published set's file (docs/evals.md).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many questions of each subset.")] = None,
    repeats: Annotated[int, typer.Option(min=1, max=1024, help="Answers to each question.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus, in (0, 1].")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Only the k likeliest tokens.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer, its thoughts included.")] = 1024,
    thinking: Annotated[bool | None, typer.Option(help="Ask a chat model to reason first, or not.")] = None,
    seed: Annotated[int, typer.Option(help="Of the run; every answer's own follows from it.")] = 0,
    model: Model = None,
    router: Router = None,
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
    """Ask every question and write the answers into a folder; what is there already is not asked again."""
    from headrace.cli.evals_run import RunOptions, run
    from headrace.evals.run_folder import Sampling

    source = source_of(model, router, api_key, name, concurrency, timeout, device, dtype, threads, config, sets)
    sampling = Sampling(temperature, top_p, top_k, max_tokens, thinking)
    raise typer.Exit(run(source, RunOptions(dataset, out, data, limit, repeats, seed, sampling)))


@app.command()
def grade(
    folder: Folder,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="URL|HOST:PORT", help="Who judges where no rule can: an OpenAI-compatible API (…/v1), or a router."
        ),
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="The judge's name; needed with a URL.")] = None,
    judge_key: Annotated[
        str | None,
        typer.Option(envvar="HEADRACE_JUDGE_API_KEY", show_envvar=False, help="Default: $HEADRACE_JUDGE_API_KEY."),
    ] = None,
    judge_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a verdict.")] = 4096,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Most questions to the judge under way.")] = 16,
    timeout: Annotated[float, typer.Option(min=0.001, max=86_400, help="Seconds for each.")] = 600.0,
) -> None:
    """Grade the answers of a run. Starts no model; what a judge has said before is not asked again."""
    from headrace.cli.evals_grade import Judge, grade

    asked = None if judge is None else Judge(judge, judge_model, judge_key, judge_tokens, concurrency, timeout)
    raise typer.Exit(grade(folder, asked, judge_model))


@app.command()
def report(folder: Folder, json: Json = False) -> None:
    """Show accuracy with its interval, by subset."""
    from headrace.cli.evals_grade import report

    report(folder, as_json=json)
