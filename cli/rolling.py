"""`headrace restart`: one replica after another of a cluster of `headrace up`, without a failed request.

The launcher owns the processes, so it is the launcher that restarts them; the command leaves a request in the
launcher's directory, which only its user can write, and follows what the launcher writes there.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.cli import state
from headrace.cli.cluster_spec import ClusterSpec, role_of
from headrace.cli.exits import CliError, Exit
from headrace.cli.local_cluster import LocalCluster
from headrace.v1 import registry_pb2

REQUEST: Final = "restart.json"
POLL_SECONDS: Final = 0.1
TAKEN_SECONDS: Final = 10.0
"""Longest wait for the launcher to see a request."""
SETTLE_SECONDS: Final = 60.0
"""Longest wait for all replicas to be ready before the next one is restarted."""


@dataclass(frozen=True)
class Plan:
    """Replicas in the order in which they are restarted."""

    names: tuple[str, ...]
    allow_gap: bool = False


def plan(spec: ClusterSpec, wanted: Sequence[str] = (), *, with_router: bool = False, allow_gap: bool = False) -> Plan:
    """Workers first, then the router if asked. Raises CliError for unknown names, and for a replica that is alone in
    its role, without which requests fail."""
    unknown = sorted(set(wanted) - set(spec.names))
    if unknown:
        raise CliError(f"no replica {unknown[0]!r} in this cluster; it has {', '.join(spec.names)}")
    workers = [name for name in spec.names[1:] if not wanted or name in wanted]
    alone = [name for name in workers if spec.replicas[role_of(name)] == 1]
    if alone and not allow_gap:
        raise CliError(
            f"{', '.join(alone)}: the only replica of its role, and requests fail while it restarts; start clusters "
            "with two of each role, or say --allow-gap"
        )
    router = [name for name in spec.names[:1] if with_router or name in wanted]
    return Plan((*workers, *router), allow_gap)


def roll(cluster: LocalCluster, what: Plan, tell: Callable[[str, str], None]) -> None:
    """Restart one replica at a time, each only when all others are ready, or drained by somebody who knows why. `tell`
    gets (event, replica).

    Raises ChildFailed, CliError; what was not restarted by then runs on.
    """
    for name in what.names:
        cluster.settle(SETTLE_SECONDS)
        if not what.allow_gap:
            _require_another(cluster, name)
        tell("restarting", name)
        cluster.restart(name)
        tell("ready", name)


def _require_another(cluster: LocalCluster, name: str) -> None:
    """Roles may have been changed since the start (`headrace role`), and workers drained. Raises CliError."""
    ready = {
        one.peer.replica_id: one.role
        for one in cluster.status().members
        if one.state == registry_pb2.REPLICA_STATE_READY
    }
    # One that takes no requests is missed by none.
    if name in ready and not any(role == ready[name] for other, role in ready.items() if other != name):
        raise CliError(
            f"{name} is alone in its role now; change a role back, let drained workers take work again, or say "
            "--allow-gap",
            Exit.FAILED,
        )


# --- the launcher's side ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a command left."""

    answer: Path
    names: tuple[str, ...]
    with_router: bool
    allow_gap: bool

    def tell(self, event: str, **fields: str) -> None:
        """One line of progress."""
        with self.answer.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")


def take_request(state_dir: Path) -> Request | None:
    """The request that waits, once."""
    path = state_dir / REQUEST
    if not path.is_file():
        return None
    asked = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    answer = state_dir / f"restart-{asked['id']}.jsonl"
    return Request(answer, tuple(asked["names"]), bool(asked["with_router"]), bool(asked["allow_gap"]))


# --- the command's side ----------------------------------------------------------------------------------------


def restart(router: str, names: Sequence[str], *, with_router: bool, allow_gap: bool, as_json: bool) -> int:
    """Ask the launcher and follow it to the end."""
    state_dir = state.state_directory(router)
    for line in ask(state_dir, {"names": list(names), "with_router": with_router, "allow_gap": allow_gap}):
        if as_json:
            print(json.dumps(line), flush=True)
        elif line["event"] == "failed":
            pass
        elif line["event"] != "taken":
            print(" ".join(str(value) for value in line.values()), flush=True)
        if line["event"] == "failed":
            raise CliError(f"{line['error']}", Exit.FAILED)
    return Exit.DONE


def ask(state_dir: Path, request: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Lines of progress up to `done` or `failed`. Raises CliError when nobody takes the request."""
    identifier = secrets.token_hex(8)
    answer = state_dir / f"restart-{identifier}.jsonl"
    partial = state_dir / f".{REQUEST}.{identifier}"
    partial.write_text(json.dumps({"id": identifier, **request}), encoding="utf-8")
    try:
        (state_dir / REQUEST).hardlink_to(partial)
    except FileExistsError:
        raise CliError("another restart is asked for already", Exit.FAILED) from None
    finally:
        partial.unlink()
    deadline = time.monotonic() + TAKEN_SECONDS
    while not answer.is_file():
        if time.monotonic() > deadline:
            (state_dir / REQUEST).unlink(missing_ok=True)
            raise CliError("the launcher does not take the request; is it busy with another one?", Exit.FAILED)
        time.sleep(POLL_SECONDS)
    with answer.open(encoding="utf-8") as file:
        text = ""
        while True:
            text += file.readline()
            if not text.endswith("\n"):
                if not state_dir.is_dir():
                    raise CliError("the launcher is gone", Exit.UNREACHABLE)
                time.sleep(POLL_SECONDS)
                continue
            line: dict[str, str] = json.loads(text)
            text = ""
            yield line
            if line["event"] in ("done", "failed"):
                answer.unlink(missing_ok=True)
                return
