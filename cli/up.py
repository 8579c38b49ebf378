"""`headrace up`: a local cluster in the foreground, with a live table, until Ctrl-C."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.cli import state
from headrace.cli.child import Child, describe_end
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.exits import CliError, Exit
from headrace.cli.local_cluster import ChildFailed, LocalCluster
from headrace.cli.rolling import Request, plan, roll, take_request
from headrace.cli.tables import load_text, requests_text, state_name
from headrace.services.runtime.errors import HeadraceError
from headrace.v1 import control_pb2

REFRESH_SECONDS: Final = 0.5
"""Between two questions to the router."""
SHOW_SECONDS: Final = 0.25
"""Between two drawings of the table while the cluster starts or stops."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class UpOptions:
    """Of the command, beside the cluster itself."""

    run_dir: Path | None
    keep_going: bool
    as_json: bool
    start_seconds: float


class _StopRequested(Exception):
    """A signal came while the cluster was starting."""


class _Up:
    def __init__(self, spec: ClusterSpec, options: UpOptions) -> None:
        self.spec = spec
        self.options = options
        self.console = Console(stderr=options.as_json)
        self.state_dir = state.new_run_directory()
        """Where other commands look for this cluster; the logs are here too, unless the user wants them elsewhere."""
        self.run_dir = (options.run_dir or self.state_dir).absolute()
        self.cluster = LocalCluster(
            spec, run_dir=self.run_dir, start_seconds=options.start_seconds, on_change=self._changed
        )
        self.live: Live | None = None
        self.phase = "starting"
        self.signals = 0
        self.shown = 0.0
        self.told_dead: set[str] = set()
        self.status: control_pb2.StatusResponse | None = None

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals > 1:
            self.cluster.hurry()

    def _changed(self) -> None:
        if self.signals and self.phase == "starting":
            raise _StopRequested
        if time.monotonic() - self.shown > SHOW_SECONDS:
            self._show()

    def run(self) -> int:
        before = {number: signal.signal(number, self.on_signal) for number in _SIGNALS}
        try:
            with Live(console=self.console, auto_refresh=False, transient=True) as live:
                self.live = live if self.console.is_terminal else None
                return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        self._say(f"starting {', '.join(self.spec.names)}; logs in {self.run_dir}")
        try:
            self.cluster.start()
        except _StopRequested:
            self._say("stopped while starting")
            self._remove_run_dir()
            return Exit.DONE
        self.phase = "ready"
        state.publish(
            self.state_dir, self.run_dir, self.cluster.router, self.spec.served_name, self.spec.folder.resolve()
        )
        self._tell_ready()
        code = Exit.DONE
        try:
            self._watch()
        except ChildFailed as error:
            print(f"headrace: {error}", file=sys.stderr)
            code = Exit.FAILED
        self.phase = "stopping"
        self._say("stopping" if code is Exit.FAILED else "draining; press Ctrl-C again to stop at once")
        (self.state_dir / state.STATE_FILE).unlink(missing_ok=True)
        bad = set(self.cluster.stop(drain=code is Exit.DONE)) - self.told_dead
        if bad and code is Exit.DONE:
            raise CliError(f"{', '.join(sorted(bad))} did not end cleanly; logs in {self.run_dir}", Exit.FAILED)
        if code is Exit.DONE:
            self._remove_run_dir()
            self._say("stopped")
        return code

    def _watch(self) -> None:
        """Until a signal. Raises ChildFailed when a child ends that must not."""
        refreshed = 0.0
        while not self.signals:
            for child in self.cluster.dead():
                self._child_died(child)
            if time.monotonic() - refreshed > REFRESH_SECONDS and self.live is not None:
                self._refresh_status()
                refreshed = time.monotonic()
                self._show()
            request = take_request(self.state_dir)
            if request is not None:
                self._restart(request)
            time.sleep(0.1)

    def _restart(self, request: Request) -> None:
        """Carry out what `headrace restart` asks for. A child that does not come back ends the cluster, as its death
        would."""
        request.tell("taken")
        try:
            what = plan(self.spec, request.names, with_router=request.with_router, allow_gap=request.allow_gap)
            self._say(f"restarting {', '.join(what.names)}, one after another")
            roll(self.cluster, what, lambda event, name: request.tell(event, replica=name))
        except CliError as error:
            request.tell("failed", error=str(error))
            self._say(f"the restart ended early: {error}")
            if isinstance(error, ChildFailed):
                raise
        else:
            request.tell("done")
            self._say("all are restarted")

    def _child_died(self, child: Child) -> None:
        if not self.options.keep_going or child.role == "router":
            raise ChildFailed(child, "ended")
        if child.name not in self.told_dead:
            self.told_dead.add(child.name)
            self._say(f"{child.name} ended with {describe_end(child.status or 0)}; going on without it ({child.log})")

    def _refresh_status(self) -> None:
        try:
            self.status = self.cluster.status()
        except HeadraceError as error:
            self._say(f"the router does not answer: {error}")
            self.status = None

    def _show(self) -> None:
        self.shown = time.monotonic()
        if self.live is not None:
            self.live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        members = {one.peer.replica_id: one for one in self.status.members} if self.status else {}
        table = Table(header_style="bold")
        for name in ("replica", "state", "load", "pid"):
            table.add_column(name)
        for child in self.cluster.children:
            member = members.get(child.name)
            if child.status is not None:
                shown = f"[red]{describe_end(child.status)}[/red]" if self.phase != "stopping" else "[dim]ended[/dim]"
            elif self.phase == "stopping":
                shown = "[yellow]draining[/yellow]"
            elif member is not None:
                name = state_name(member.state)
                shown = f"[green]{name}[/green]" if name == "ready" else f"[yellow]{name}[/yellow]"
            else:
                shown = "[green]ready[/green]" if child.name in self.cluster.ready else "[yellow]starting[/yellow]"
            load = "–"
            if member is not None:
                load = load_text(member)
            elif child.role == "router" and self.status is not None:
                load = requests_text(self.status.requests)
            table.add_row(child.name, shown, load, str(child.pid))
        return table

    def _tell_ready(self) -> None:
        cluster = self.cluster
        if self.options.as_json:
            children = [{"name": one.name, "pid": one.pid, "address": one.address} for one in cluster.children]
            ready = {"event": "ready", "router": cluster.router, "model": self.spec.served_name}
            print(json.dumps({**ready, "run_dir": str(self.run_dir), "replicas": children}), flush=True)
            return
        self._say(f"ready: {self.spec.served_name} at {cluster.router}")
        self._say("try `headrace generate --chat 'What is the capital of France?'`; Ctrl-C here stops the cluster")

    def _say(self, text: str) -> None:
        if self.live is not None:
            self.console.print(Text(text))
        else:
            print(text, file=sys.stderr if self.options.as_json else sys.stdout, flush=True)

    def _remove_run_dir(self) -> None:
        """Logs in a directory that the user named stay."""
        state.remove_run_directory(self.state_dir)


def up(spec: ClusterSpec, options: UpOptions) -> int:
    """Run a cluster until a signal or a child's death; the exit status."""
    return int(_Up(spec, options).run())
