"""The flags of the commands that send requests to a running cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.flags import ApiKey, Json, Router


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text; `-` or nothing reads standard input.")] = None,
    system: Annotated[str | None, typer.Option(help="System message; makes it a chat.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Render the prompt by the model's chat template.")] = False,
    image: Annotated[list[Path] | None, typer.Option(help="A picture; makes it a chat. Repeatable.")] = None,
    thinking: Annotated[bool | None, typer.Option(help="Ask a chat model to reason first, or not.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of a choice.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus, in (0, 1].")] = None,
    top_k: Annotated[int | None, typer.Option(help="Only the k likeliest tokens; 0 is off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="In -2 … 2.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="In -2 … 2.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 0; 1 is off.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same answer; default: drawn and told by --report.")
    ] = None,
    n: Annotated[int | None, typer.Option(help="Number of choices.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities of this many tokens (--json).")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a choice. Repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at end-of-sequence tokens.")] = False,
    traffic_class: Annotated[
        str | None, typer.Option(help="agent, chat or batch: how long its prefix is kept; default: the tenant's.")
    ] = None,
    priority: Annotated[int, typer.Option(help="Higher goes first, as far as your key allows.")] = 0,
    snapshot_at: Annotated[
        list[int] | None,
        typer.Option(help="Keep a reusable prefix of this many tokens (a multiple of the block). Repeatable."),
    ] = None,
    timeout: Annotated[float | None, typer.Option(min=0.001, help="Deadline in seconds.")] = None,
    report: Annotated[bool, typer.Option("--report", help="Tell where and how long it ran.")] = False,
    router: Router = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Ask a running cluster; the answer streams to standard output."""
    from headrace.cli.generate import GenerateOptions, generate
    from headrace.cli.state import find_router

    options = GenerateOptions(
        prompt=prompt,
        system=system,
        chat=chat,
        images=tuple(image or ()),
        thinking=thinking,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        seed=seed,
        n=n,
        logprobs=logprobs,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        traffic_class=traffic_class,
        priority=priority,
        snapshot_at=tuple(snapshot_at or ()),
        timeout_s=timeout,
        report=report,
        as_json=json,
    )
    raise typer.Exit(generate(find_router(router), options, api_key))


def replay(
    trace: Annotated[Path, typer.Option(metavar="FILE", help="A request trace: mooncake, V4-Flash log or Azure.")],
    speed: Annotated[float, typer.Option(help="Trace seconds per second.")] = 1.0,
    scale: Annotated[float, typer.Option(help="Factor of prompt lengths, for small models.")] = 1.0,
    output_scale: Annotated[float | None, typer.Option(help="Factor of output lengths; default: as --scale.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many requests.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests under way; what comes then is late.")] = 64,
    timeout: Annotated[float, typer.Option(min=0.001, help="Deadline of each request in seconds.")] = 300.0,
    seed: Annotated[int, typer.Option(help="Of the tokens that blocks are made of.")] = 0,
    router: Router = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Send a trace's requests, at its times, to a running cluster; equal blocks are equal tokens."""
    from headrace.cli.replay import ReplayOptions, replay
    from headrace.cli.state import find_router

    options = ReplayOptions(trace, speed, scale, output_scale, limit, concurrency, timeout, seed, json)
    raise typer.Exit(replay(find_router(router), options, api_key))
