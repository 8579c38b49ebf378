"""Child processes that answer on a port, and that a test or benchmark kills."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench._ports import free_ports

_START_S = 90.0


class ServerMissing(RuntimeError):
    """A server's program is not installed; the message names the package."""


def program(name: str, package: str) -> str:
    """Path of an installed program: beside this interpreter, or in PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ServerMissing(f"{name} is not installed ({package})")
    return found


@dataclass
class Server:
    """One process. Its output goes to `log`."""

    command: list[str]
    port: int
    log: Path
    folder: Path | None = None
    """Where it runs."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start without waiting."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.folder)

    def wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"{self.command[0]} ended: {self.log.read_text()[-2000:]}")
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{self.command[0]} does not listen on {self.port}") from error
                time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Harmless if it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP, and wait until every thread has stopped: it holds its connections and answers nothing."""
        self._signal(signal.SIGSTOP)
        if self._process is not None:
            tasks = Path(f"/proc/{self._process.pid}/task")
            while any(_state(task / "stat") not in "TZ" for task in tasks.iterdir()):
                time.sleep(0.001)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)


def _state(stat: Path) -> str:
    """The state letter of a thread (proc(5))."""
    return stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]


def redis_server(folder: Path, port: int = 0) -> Server:
    """A Redis without persistence: killed, it comes back empty."""
    binary = program("redis-server", "Debian package redis-server")
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_ports(1)[0]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    return Server([binary, *options], port, folder / "log")
