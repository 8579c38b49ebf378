"""The flags of `headrace simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.flags import Json


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
