"""A gateway on this machine in front of clusters, as a child process that ends with its launcher.

with LocalCluster(spec) as cluster, LocalGateway([served(cluster, "template")]) as gateway:
    openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any")
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from headrace.cli.child import Child, ChildSpec, address_file, same_code
from headrace.cli.exits import CliError, Exit
from headrace.cli.local_cluster import ChildFailed, LocalCluster

START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 45.0
POLL_SECONDS: Final = 0.05
NAME: Final = "gateway-0"


def served(cluster: LocalCluster, protocol: Literal["template", "v4.1"], **more: Any) -> dict[str, Any]:
    """The entry of `gateway.models` for a running cluster; `more` are further fields of it."""
    spec = cluster.spec
    folder = str(spec.folder.resolve())
    entry = {"name": spec.served_name, "router": cluster.router, "folder": folder, "protocol": protocol}
    return entry | more


class LocalGateway:
    """Start with `start` or as a context manager."""

    def __init__(
        self, models: Sequence[dict[str, Any]], *, sets: Sequence[str] = (), run_dir: Path | None = None
    ) -> None:
        """`models` as in settings `gateway.models`; `sets` are further `section.field=value`. `run_dir` holds log and
        address; None makes a temporary one."""
        self._models = list(models)
        self._sets = tuple(sets)
        self._run_dir = run_dir
        self._own: tempfile.TemporaryDirectory[str] | None = None
        self._child: Child | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """http://host:port. Raises CliError before the start."""
        address = None if self._child is None else self._child.address
        if address is None:
            raise CliError("the gateway has not started")
        return f"http://{address}"

    @property
    def child(self) -> Child:
        """The process. Raises CliError before the start."""
        if self._child is None:
            raise CliError("the gateway has not started")
        return self._child

    def start(self) -> None:
        """Start it and wait until it is ready. Raises ChildFailed, CliError; nothing is left running then."""
        if self._run_dir is None:
            self._own = tempfile.TemporaryDirectory(prefix="headrace-gateway-")
            self._run_dir = Path(self._own.name)
        command = [sys.executable, "-m", "headrace.cli.main", "serve", "gateway"]
        for item in (
            "log.format=console",
            f"gateway.models={json.dumps(self._models)}",
            *self._sets,
            f"listen.address_file={address_file(self._run_dir, NAME)}",
            f"stop.parent_pid={os.getpid()}",
        ):
            command += ["--set", item]
        self._child = Child(ChildSpec(NAME, "gateway", tuple(command), same_code(os.environ)), self._run_dir)
        try:
            self._until_ready(self._child)
        except BaseException:
            self.stop()
            raise

    def _until_ready(self, child: Child) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (child.address is not None and _answers(f"{self.url}/ready")):
            if child.status is not None:
                raise ChildFailed(child, "ended while it was starting")
            if time.monotonic() > deadline:
                raise CliError(f"the gateway is not ready after {START_SECONDS:.0f} s:\n{child.tail()}", Exit.FAILED)
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End it: it finishes what runs, within its drain time."""
        if self._child is not None:
            if self._child.status is None:
                self._child.signal(signal.SIGTERM)
                self._child.wait(STOP_SECONDS)
            self._child.kill()
        if self._own is not None:
            self._own.cleanup()


def _answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
