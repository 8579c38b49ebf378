"""Starts processes quickly: a parent that has imported everything forks them, so that a busy machine spends its time on
what is being tried and not on importing torch a hundred times. Each child is a process of its own, as after exec.

The parent reads one JSON object per line, {"name", "arguments", "log"}, and writes one per start and per end. It ends
its children when its input ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

POLL_S = 0.05
TAIL_BYTES = 16 * 1024


@dataclass(eq=False)
class Forked:
    """A child of the parent."""

    name: str
    pid: int
    log: Path
    status: int | None = None
    """Exit status, −N for signal N, None while it runs."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def signal(self, number: signal.Signals) -> None:
        """None is sent to one that has ended."""
        if self.status is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:  # its end is on the way to us
                return

    async def wait(self, seconds: float) -> bool:
        """Whether it ended within the time."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self.ended.wait()
        except TimeoutError:
            return False
        return True

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            return "\n".join(file.read().decode("utf-8", errors="replace").splitlines()[-lines:])


class Zygote:
    """The parent, from the harness's side. `async with`; its children end with it."""

    def __init__(self, environ: Mapping[str, str], run_dir: Path) -> None:
        self._environ = environ
        self._run_dir = run_dir
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._children: dict[int, Forked] = {}
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._early: dict[int, int] = {}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        with (self._run_dir / "zygote.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.chaos.zygote", stdin=PIPE, stdout=PIPE, stderr=log, env=self._environ
            )
        self._reader = asyncio.create_task(self._read(), name="zygote")

    async def spawn(self, name: str, *arguments: str) -> Forked:
        """`headrace ARGUMENTS` with a log of its name, which goes on where there is one."""
        assert self._process is not None
        assert self._process.stdin is not None
        log = self._run_dir / f"{name}.log"
        started = self._starting[name] = asyncio.get_running_loop().create_future()
        wanted = {"name": name, "arguments": arguments, "log": str(log)}
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        pid = await started
        child = self._children[pid] = Forked(name, pid, log)
        if pid in self._early:
            self._end(child, self._early.pop(pid))
        return child

    async def close(self) -> None:
        """Kill what is left."""
        if self._process is None or self._reader is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                told = json.loads(line)
                if "name" in told:
                    self._starting.pop(told["name"]).set_result(told["pid"])
                elif told["pid"] in self._children:
                    self._end(self._children.pop(told["pid"]), told["status"])
                else:
                    self._early[told["pid"]] = told["status"]
        finally:
            for started in self._starting.values():
                started.set_exception(RuntimeError("the zygote ended; zygote.log says why"))

    def _end(self, child: Forked, status: int) -> None:
        child.status = status
        child.ended.set()


# --- the parent itself ---------------------------------------------------------------------------------------------


def main() -> None:
    """Import, then serve until the input ends."""
    import headrace.cli.main
    import headrace.services.decode.main
    import headrace.services.encoder.main
    import headrace.services.prefill.main
    import headrace.services.router.main  # noqa: F401 - what children need

    gc.freeze()
    children: set[int] = set()
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], POLL_S)
        if readable:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                wanted = json.loads(line)
                children.add(pid := _fork(wanted["arguments"], wanted["log"]))
                _tell({"name": wanted["name"], "pid": pid})
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            children.discard(pid)
            _tell({"pid": pid, "status": os.waitstatus_to_exitcode(status)})
    for pid in children:
        os.killpg(pid, signal.SIGKILL)


def _fork(arguments: list[str], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.closerange(3, 256)
    from headrace.cli.main import main as headrace_main

    sys.argv = ["headrace", *arguments]
    status = 1
    try:
        headrace_main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _tell(what: dict[str, object]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    main()
