"""Service processes for tests, without each importing torch anew: a parent that has imported everything forks them.

    zygote = Zygote()
    process = zygote.popen(HEADRACE, ["serve", "decode", …], environ=…, log=path)     # as subprocess.Popen

Each child is a process of its own, in a session of its own, and dies as any other; only its imports, which take four
seconds of a core, were done before. The parent reads one JSON object per line and writes one per start and per end; it
kills its children when its input ends.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any

HEADRACE = "headrace.cli.main"
SERVE_PROCESS = "tests.services.serve_process"
POLL_S = 0.05


class ForkedProcess:
    """A child of the zygote, with those methods of subprocess.Popen that a launcher uses."""

    def __init__(self, args: Sequence[str], pid: int, ended: Future[int]) -> None:
        self.args = args
        self.pid = pid
        self.ended = ended
        """Exit status, −N for signal N."""

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self.ended.result() if self.ended.done() else None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        try:
            return self.ended.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0) from None

    def send_signal(self, number: int) -> None:
        """Nothing is sent to one that has ended."""
        if self.returncode is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:  # the word of its end is on the way
                return

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The parent, from its user's side; started at first use, ended with this process. Used from any thread."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """`environ`: what its own environment has besides: a preloaded library has to be there before the fork."""
        self._environ = environ or {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = 0
        self._starts: dict[int, Future[int]] = {}
        self._ends: dict[int, Future[int]] = {}

    def popen(self, module: str, argv: Sequence[str], *, environ: Mapping[str, str], log: Path) -> ForkedProcess:
        """`python -m module argv`, its output at the end of `log`, on the caller's cores and in its directory. A child
        that watches this process (stop.parent_pid) watches the zygote, which ends with it."""
        parent = self._running()
        own, theirs = f"stop.parent_pid={os.getpid()}", f"stop.parent_pid={parent.pid}"
        arguments = [theirs if argument == own else argument for argument in argv]
        wanted = {
            "module": module,
            "argv": arguments,
            "environ": dict(environ),
            "log": str(log),
            "cores": sorted(os.sched_getaffinity(0)),
            "folder": str(Path.cwd()),
        }
        with self._lock:
            self._numbers += 1
            number = self._numbers
            started = self._starts[number] = Future()
            ended = self._ends[number] = Future()
            ended.set_running_or_notify_cancel()  # who stops waiting for it does not end it
            assert parent.stdin is not None
            parent.stdin.write(json.dumps(wanted | {"number": number}).encode() + b"\n")
            parent.stdin.flush()
        return ForkedProcess((module, *argv), started.result(), ended)

    def close(self) -> None:
        """Kill what is left. The zygote itself ends when it has."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._process is None:
                own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "tests.zygote"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=os.environ | own | self._environ,
                    start_new_session=True,
                )
                threading.Thread(target=self._read, args=(self._process,), name="zygote", daemon=True).start()
                atexit.register(self.close)
            return self._process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                told = json.loads(line)
                if "pid" in told:
                    self._starts.pop(told["number"]).set_result(told["pid"])
                else:
                    self._ends.pop(told["number"]).set_result(told["status"])
        with self._lock:
            lost = [*self._starts.values(), *self._ends.values()]
        for future in lost:
            if not future.done():
                future.set_exception(RuntimeError("the zygote has ended"))


ZYGOTE = Zygote()
"""Of this test process."""

# --- the parent itself ----------------------------------------------------------------------------------------------


def main() -> None:
    """Import, then serve until the input ends."""
    for role in ("decode", "encoder", "prefill", "router"):
        import_module(f"headrace.services.{role}.main")
    import_module(HEADRACE)
    gc.freeze()
    children: dict[int, int] = {}
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], POLL_S)
        if readable:
            data = os.read(0, 1 << 20)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                wanted = json.loads(line)
                begun, began = os.pipe()
                pid = os.fork()
                if not pid:
                    os.setsid()
                    os.write(began, b"1")
                    _become(wanted)
                os.read(begun, 1)  # whoever is told of it may kill its process group
                os.close(begun)
                os.close(began)
                children[pid] = wanted["number"]
                _tell({"number": wanted["number"], "pid": pid})
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            _tell({"number": children.pop(pid), "status": os.waitstatus_to_exitcode(status)})
    for pid in children:
        os.killpg(pid, signal.SIGKILL)


def _become(wanted: dict[str, Any]) -> None:
    """In the child: never returns."""
    status = 1
    try:
        out = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        os.closerange(3, 256)
        os.sched_setaffinity(0, wanted["cores"])
        os.chdir(wanted["folder"])
        os.environ.clear()
        os.environ.update(wanted["environ"])
        random.seed()
        sys.argv = [wanted["module"], *wanted["argv"]]
        ended = import_module(wanted["module"]).main()
        status = ended if isinstance(ended, int) else 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the interpreter's own last word, as the parent's loop must not run here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _tell(what: dict[str, int]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    main()
