"""One child process of a local cluster: started in a session of its own, logging to a file, ended for certain."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import headrace
from headrace.cli.exits import CliError

TAIL_BYTES = 16 * 1024
"""How far back a log's tail is looked for."""


@dataclass(frozen=True)
class ChildSpec:
    """What to start."""

    name: str
    """Replica id, and the stem of its files in the run directory."""
    role: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    cores: frozenset[int] = frozenset()
    """CPU cores it may run on; empty leaves the parent's."""


class Child:
    """A running (or ended) child. Not a member of the caller's process group: a terminal's Ctrl-C reaches the caller
    alone, which then ends its children in order."""

    def __init__(self, spec: ChildSpec, run_dir: Path, *, restarted: bool = False) -> None:
        """Start it; one that is `restarted` goes on with its log. Raises CliError when it cannot be started."""
        self.spec = spec
        self.name = spec.name
        self.role = spec.role
        self.log = run_dir / f"{spec.name}.log"
        self._address_file = address_file(run_dir, spec.name)
        self._address_file.unlink(missing_ok=True)
        self._address: str | None = None
        with self.log.open("ab" if restarted else "wb") as log, _running_on(spec.cores):
            try:
                self._process = subprocess.Popen(
                    spec.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(spec.environ),
                    start_new_session=True,
                )
            except OSError as error:
                raise CliError(f"cannot start {spec.name}: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, −N for signal N, None while it runs."""
        return self._process.poll()

    @property
    def address(self) -> str | None:
        """host:port, once its port answers; read once, so that a cleaner of temporary files does no harm."""
        if self._address is None and self._address_file.is_file():
            self._address = self._address_file.read_text(encoding="utf-8").strip()
        return self._address

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone; none is sent to one that has ended."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within the time."""
        try:
            self._process.wait(max(timeout_s, 0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it and all that it started at once, and reap it."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return f"({self.log} was removed)"
        return "\n".join(text.splitlines()[-lines:])


def address_file(run_dir: Path, name: str) -> Path:
    """Where the child of this name writes its address (listen.address_file)."""
    return run_dir / f"{name}.address"


def same_code(environ: Mapping[str, str]) -> dict[str, str]:
    """With the same code for a child as this process runs, wherever that was found; a bare `import router` must find
    nothing."""
    root = str(Path(headrace.__file__).resolve().parents[1])
    paths = [root, *(path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    return {**environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONSAFEPATH": "1"}


def describe_end(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


@contextmanager
def _running_on(cores: frozenset[int]) -> Iterator[None]:
    """The calling thread on these cores for the block: a child inherits the affinity of the thread that starts it,
    so that no code has to run between fork and exec."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise CliError(f"cannot run on cores {_listed(cores)}: {error.strerror}; have {_listed(before)}") from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _listed(cores: Sequence[int] | frozenset[int] | set[int]) -> str:
    return ",".join(str(core) for core in sorted(cores))
