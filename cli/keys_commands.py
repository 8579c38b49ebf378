"""The flags of `headrace keys …`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.exits import CliError
from headrace.cli.flags import Config, Json

if TYPE_CHECKING:
    from headrace.cli.keys import StoreOptions

app = typer.Typer(
    name="keys", no_args_is_help=True, rich_markup_mode=None, help="Make, list and revoke the API keys of a cluster."
)
Store = Annotated[
    str | None,
    typer.Option("--store", metavar="FILE|etcd", help="As router.keys has it; default: what the settings say."),
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="section.field=value (registry.…). Repeatable.")
]


def _store(store: str | None, config: Path | None, sets: list[str] | None) -> StoreOptions:
    from headrace.cli.keys import StoreOptions

    return StoreOptions(store, config, tuple(sets or ()))


@app.command("create")
def create(
    tenant: Annotated[str | None, typer.Option(help="Whose requests it sends.")] = None,
    operator: Annotated[str | None, typer.Option(help="Who manages the cluster with it.")] = None,
    days: Annotated[float | None, typer.Option(min=0.0001, help="How long it is good; default: until revoked.")] = None,
    requests_per_second: Annotated[float | None, typer.Option(help="Of the tenant, over all routers.")] = None,
    tokens_per_second: Annotated[float | None, typer.Option(help="Prompt and output, over all routers.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Requests at once, over all routers.")] = None,
    max_priority: Annotated[int | None, typer.Option(help="Highest that its requests may ask for.")] = None,
    traffic_class: Annotated[str | None, typer.Option(help="agent, chat or batch, of requests that name none.")] = None,
    sharing_domain: Annotated[str | None, typer.Option(help="Tenants of one share prefixes and images.")] = None,
    store: Store = None,
    config: Config = None,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Make a key and print it: it is shown this once, and kept as a digest. Limits are the tenant's, not the key's."""
    from headrace.cli.keys import create
    from headrace.services.router.api_keys import KeyRole

    if (tenant is None) == (operator is None):
        raise CliError("whose key? name either --tenant or --operator")
    limits = {
        "requests_per_second": requests_per_second,
        "tokens_per_second": tokens_per_second,
        "max_concurrent": max_concurrent,
        "max_priority": max_priority,
        "traffic_class": traffic_class,
        "sharing_domain": sharing_domain,
    }
    create(
        _store(store, config, sets),
        KeyRole.OPERATOR if tenant is None else KeyRole.TENANT,
        tenant or operator or "",
        days=days,
        limits={name: value for name, value in limits.items() if value is not None},
        as_json=json,
    )


@app.command("list")
def list_keys(store: Store = None, config: Config = None, sets: Sets = None, json: Json = False) -> None:
    """List keys by id, never their values."""
    from headrace.cli.keys import show

    show(_store(store, config, sets), as_json=json)


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Of `headrace keys list`.")],
    store: Store = None,
    config: Config = None,
    sets: Sets = None,
) -> None:
    """End a key; every router refuses it within seconds."""
    from headrace.cli.keys import revoke

    revoke(_store(store, config, sets), key_id)
