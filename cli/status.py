"""`headrace status`: the router's view of the cluster, and each replica's own."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.cli.client import RouterClient, replica_status
from headrace.cli.client_tls import client_tls
from headrace.cli.exits import Exit
from headrace.cli.failures import told
from headrace.cli.tables import as_json, load_text, requests_text, role_name, state_name
from headrace.services.runtime.errors import HeadraceError
from headrace.v1 import control_pb2, registry_pb2


def status(router: str, api_key: str | None, *, check: bool, as_json_text: bool) -> int:
    """Print the state; UNHEALTHY when something is not ready or an integrity check found something."""
    tls = client_tls(router)
    with told(router), RouterClient(router, api_key=api_key, tls=tls) as client:
        head = client.status(check_integrity=check)
        replicas: dict[str, control_pb2.StatusResponse] = {}
        unreachable: dict[str, str] = {}
        for member in head.members:
            try:
                replicas[member.peer.replica_id] = replica_status(member.endpoint, check_integrity=check, tls=tls)
            except HeadraceError as error:
                unreachable[member.peer.replica_id] = str(error)
    problems = _problems(head, replicas, unreachable)
    if as_json_text:
        print(json.dumps(_document(head, replicas, problems), indent=2, ensure_ascii=False))
    else:
        _show(router, head, replicas, unreachable, problems, check)
    return Exit.UNHEALTHY if problems else Exit.DONE


def _problems(
    head: control_pb2.StatusResponse,
    replicas: dict[str, control_pb2.StatusResponse],
    unreachable: dict[str, str],
) -> list[str]:
    found = [f"{name} does not answer: {why}" for name, why in unreachable.items()]
    for name, one in {"router": head, **replicas}.items():
        if not one.ready:
            found.append(f"{name} is not ready: {one.unready_reason or 'no reason given'}")
        found += [f"{name}: {problem}" for problem in one.integrity.problems]
        if one.integrity.checked and not one.requests.live:
            found += [
                f"{name}: {pool.quarantined} {pool.name} wait in quarantine though nothing runs: a sender has not said "
                "that its wire is quiet"
                for pool in one.pools
                if pool.quarantined
            ]
    return found


def _document(
    head: control_pb2.StatusResponse, replicas: dict[str, control_pb2.StatusResponse], problems: list[str]
) -> dict[str, Any]:
    return {
        "router": as_json(head),
        "replicas": {name: as_json(one) for name, one in replicas.items()},
        "healthy": not problems,
        "problems": problems,
    }


def _show(
    router: str,
    head: control_pb2.StatusResponse,
    replicas: dict[str, control_pb2.StatusResponse],
    unreachable: dict[str, str],
    problems: list[str],
    check: bool,
) -> None:
    console = Console()
    table = Table(header_style="bold")
    for name in ("replica", "role", "state", "requests", "load", "pid", "address"):
        table.add_column(name, overflow="fold")
    table.add_row(
        head.replica.peer.replica_id,
        "router",
        state_name(head.replica.state) if head.ready else f"[red]{head.unready_reason}[/red]",
        requests_text(head.requests),
        "–",
        str(head.replica.pid),
        router,
    )
    for member in head.members:
        name = member.peer.replica_id
        own = replicas.get(name)
        table.add_row(
            name,
            role_name(member.role),
            f"[red]{'does not answer' if own is None else own.unready_reason}[/red]"
            if own is None or not own.ready
            else state_name(own.replica.state),
            "–" if own is None else requests_text(own.requests),
            load_text(member if own is None else own.replica),
            str(member.pid),
            member.endpoint,
        )
    console.print(table)
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False)
    if check and not problems:
        console.print("integrity: checked, nothing found")
    if head.members and not {registry_pb2.REPLICA_STATE_READY} & {one.state for one in head.members}:
        console.print("no replica is ready")
