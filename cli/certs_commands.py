"""`headrace certs`: an authority and certificates for development and small clusters (SECURITY.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="certs", no_args_is_help=True, rich_markup_mode=None, help="Make an authority and certificates for mutual TLS."
)
Folder = Annotated[Path, typer.Argument(help="Where the authority lives.")]


@app.command("init")
def init(
    folder: Folder,
    days: Annotated[int, typer.Option(min=1, help="How long it is valid.")] = 3650,
) -> None:
    """Make an authority. Its ca.key signs anything: keep it off the machines that serve."""
    from headrace.cli.certificates import make_authority

    make_authority(folder, days)
    print(folder / "ca.crt")


@app.command("issue")
def issue(
    folder: Folder,
    role: Annotated[str, typer.Argument(help="router, encoder, prefill, decode, operator, monitor or client.")],
    replica: Annotated[
        str, typer.Option(help="The replica_id that it is good for; default: any replica of the role.")
    ] = "",
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address under which it is dialled; default: loopback and this machine. Repeatable."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long it is valid.")] = 365,
    name: Annotated[str | None, typer.Option(help="Of the files; default: the replica's, else the role's.")] = None,
) -> None:
    """Make a key and a certificate, over files of the same name: running processes take them up within seconds."""
    from headrace.cli.certificates import issue, own_hosts
    from headrace.cli.cluster_spec import parse_choice
    from headrace.services.runtime.peers import Peer, PeerRole

    roles = tuple(role.value for role in PeerRole if role is not PeerRole.NOBODY)
    peer = Peer(PeerRole(parse_choice("role", role, roles)), replica)
    print(issue(folder, peer, host or own_hosts(), days, name).cert)
