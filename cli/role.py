"""`headrace role`: a worker of a running cluster becomes another one; `headrace drain`: it takes no work, or again."""

from __future__ import annotations

import json
import time
from typing import Final

from headrace.cli.client import RouterClient, change_role, drain_replica, replica_status
from headrace.cli.client_tls import ClientTls, client_tls
from headrace.cli.cluster_spec import parse_choice
from headrace.cli.exits import CliError, Exit
from headrace.cli.failures import cli_error, told
from headrace.cli.tables import as_json, role_name, state_name
from headrace.services.runtime.errors import HeadraceError, Unavailable, from_proto
from headrace.services.runtime.registry.base import CHANGEABLE_ROLES
from headrace.services.runtime.registry.wire import role_to_wire
from headrace.v1 import common_pb2, control_pb2, registry_pb2

START_SECONDS: Final = 300.0
"""Longest wait for the new role beyond the drain: pools, canary."""
LIST_SECONDS: Final = 60.0
"""Longest wait for the router to list the worker again: its registration, and the router's watch."""
POLL_SECONDS: Final = 0.2


def role(
    router: str, api_key: str | None, replica: str, wanted: str, *, wait_s: float, force: bool, as_json_text: bool
) -> int:
    """Change a role and wait until the router lists the worker again; FAILED when the old role is back."""
    new = parse_choice("role", wanted, CHANGEABLE_ROLES)
    tls = client_tls(router)
    with told(router):
        member = _member(router, api_key, replica, tls, spare=not force)
    with told(member.endpoint):
        before = change_role(member.endpoint, role_to_wire(new), wait_s, tls=tls)
        done = before.state == control_pb2.ROLE_CHANGE_STATE_DONE
        change = before if done else _wait(member.endpoint, wait_s + START_SECONDS, tls)
    changed = change.state == control_pb2.ROLE_CHANGE_STATE_DONE
    with told(router):
        _wait_listed(router, api_key, replica, change.to_role if changed else change.from_role, tls)
    if as_json_text:
        print(json.dumps(as_json(change)))
    elif changed:
        print(f"{replica} is a {wanted}")
    if not changed:
        raise CliError(f"{replica} stays a {role_name(change.from_role)}: {from_proto(change.error)}", Exit.FAILED)
    return Exit.DONE


def drain(
    router: str, api_key: str | None, replica: str, *, wait_s: float, hand_over: bool, resume: bool, force: bool
) -> int:
    """Drain a worker; UNHEALTHY when something still runs there after the wait."""
    tls = client_tls(router)
    with told(router):
        member = _member(router, api_key, replica, tls, spare=not (force or resume))
    with told(member.endpoint):
        answer = drain_replica(member.endpoint, wait_s=wait_s, hand_over=hand_over, resume=resume, tls=tls)
    print(f"{replica} is {state_name(answer.state)}, {answer.live} requests run there")
    return Exit.UNHEALTHY if answer.live and not resume else Exit.DONE


def _member(
    router: str, api_key: str | None, replica: str, tls: ClientTls | None, *, spare: bool
) -> registry_pb2.Replica:
    """A worker by its name; with `spare`, only if another one of its role is ready."""
    with RouterClient(router, api_key=api_key, tls=tls) as client:
        members = client.status().members
    found = next((one for one in members if one.peer.replica_id == replica), None)
    if found is None:
        names = ", ".join(sorted(one.peer.replica_id for one in members)) or "none"
        raise CliError(f"no replica {replica!r} here; there are: {names}")
    ready = registry_pb2.REPLICA_STATE_READY
    others = [
        one for one in members if one.role == found.role and one.state == ready and one.peer.replica_id != replica
    ]
    if spare and not others:
        raise CliError(
            f"{replica} is the only {role_name(found.role)} that is ready, and requests would fail without it; --force "
            "does it nevertheless"
        )
    return found


def _wait(address: str, seconds: float, tls: ClientTls | None) -> control_pb2.RoleChange:
    """The change when it is over. Between its two lives the worker does not answer."""
    deadline = time.monotonic() + seconds
    over = (control_pb2.ROLE_CHANGE_STATE_DONE, control_pb2.ROLE_CHANGE_STATE_FAILED)
    last: HeadraceError | None = None
    while time.monotonic() < deadline:
        try:
            status = replica_status(address, tls=tls)
            if status.ready and status.role_change.state in over:
                return status.role_change
            last = None
        except Unavailable as error:
            last = error
        time.sleep(POLL_SECONDS)
    if last is not None:
        raise cli_error(last, address)
    raise CliError(f"the change is not over after {seconds:.0f} s; `headrace status` shows how far it is", Exit.FAILED)


def _wait_listed(
    router: str, api_key: str | None, replica: str, wanted: common_pb2.Role.ValueType, tls: ClientTls | None
) -> None:
    """Until the router would send it requests in this role: a worker answers before its registration has arrived."""
    deadline = time.monotonic() + LIST_SECONDS
    ready = registry_pb2.REPLICA_STATE_READY
    with RouterClient(router, api_key=api_key, tls=tls) as client:
        while time.monotonic() < deadline:
            for one in client.status().members:
                if (one.peer.replica_id, one.role, one.state) == (replica, wanted, ready):
                    return
            time.sleep(POLL_SECONDS)
    raise CliError(
        f"{replica} is a {role_name(wanted)} now, but {router} does not list it as ready after {LIST_SECONDS:.0f} s",
        Exit.FAILED,
    )
