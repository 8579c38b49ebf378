"""The `headrace` program: names of commands and flags. What they do is imported when they run: help is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.ask_commands import generate, replay
from headrace.cli.cache_commands import app as cache_app
from headrace.cli.certs_commands import app as certs_app
from headrace.cli.evals_commands import app as evals_app
from headrace.cli.exits import CliError, Exit
from headrace.cli.flags import ApiKey, Config, Json, Router, Sets
from headrace.cli.keys_commands import app as keys_app
from headrace.cli.model_commands import app as model_app
from headrace.cli.offline_commands import offline
from headrace.cli.simulate_command import simulate

app = typer.Typer(
    name="headrace",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Serve DeepSeek-class models with encoder, prefill and decode as separate services.",
)
app.add_typer(model_app)
app.add_typer(cache_app)
app.add_typer(certs_app)
app.add_typer(keys_app)
app.add_typer(evals_app)
Dtype = Annotated[str | None, typer.Option(help="float32 (exact) or bfloat16 (fast); default: the folder's.")]
ModelName = Annotated[str, typer.Option("--model", metavar="FOLDER|NAME", help="A folder, or a name of `model list`.")]


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


for command in (generate, offline, replay, simulate):
    app.command()(command)


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
