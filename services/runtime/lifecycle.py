"""How a process starts, runs and ends.

    def main() -> int:
        settings = load(DecodeSettings, …)
        async def start(life: Lifecycle) -> None:
            server = …
            life.on_stop_accepting("admission", server.refuse_admission)
            life.on_drain("requests", wait_until_idle)
            life.on_close("server", server.stop)
        return run_service(start, settings.stop)

End, after a first SIGTERM or SIGINT: stop accepting → drain, at most stop.drain_seconds → close, in the reverse order
of registration, at most stop.close_seconds → exit. A second signal ends the drain. A process whose loop hangs is ended
hard when both times have passed (L6). Death of stop.parent_pid ends it without draining.

A process may have several lives, one after another: `Lifecycle.become` ends one as a signal does, and names what begins
the next, in the same process. Each has an incarnation of its own (L14).
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

from headrace.services.runtime import logs
from headrace.services.runtime.ids import new_incarnation
from headrace.services.runtime.settings import StopSettings

EXIT_FAILED: Final = 1
EXIT_HARD: Final = 70
"""Exit status when closing did not end in time (EX_SOFTWARE)."""

Step = Callable[[], Awaitable[None]]
Start = Callable[["Lifecycle"], Awaitable[None]]
Otherwise = Callable[[BaseException], Start]
"""Of what a start raised: what begins instead."""
_log = logs.get(__name__)


class Lifecycle:
    """One life of a process, handed to its start function. Methods are for the event loop's thread."""

    def __init__(self, settings: StopSettings, hard_exit: Callable[[int], Any] = os._exit) -> None:
        self.incarnation: Final = new_incarnation()
        """128 random bits in hex, of this life (L14)."""
        self.settings = settings
        self.exit_code = 0
        self.stopping = asyncio.Event()
        """Set once this life is to end."""
        self.successor: Start | None = None
        """Begins the next life of this process."""
        self.otherwise: Otherwise | None = None
        """Begins another one if the successor does not come up."""
        self.failure: BaseException | None = None
        """What the start function raised."""
        self._no_drain = asyncio.Event()
        self._hard_exit = hard_exit
        self._hard_timer: threading.Timer | None = None
        self._arming = threading.Lock()
        self._accepting: list[tuple[str, Step]] = []
        self._draining: list[tuple[str, Step]] = []
        self._closing: list[tuple[str, Step]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def on_stop_accepting(self, name: str, step: Step) -> None:
        """Run `step` first at the end: refuse new work, leave the registry."""
        self._accepting.append((name, step))

    def on_drain(self, name: str, step: Step) -> None:
        """Wait in `step` until running work is done; cancelled when the drain time is over."""
        self._draining.append((name, step))

    def on_close(self, name: str, step: Step) -> None:
        """Release something in `step`; runs however the process ends, later registrations first."""
        self._closing.append((name, step))

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run background work for the life of the process; its failure ends the process with status 1."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def become(self, successor: Start, otherwise: Otherwise, reason: str) -> None:
        """End this life; the process goes on with `successor`, and with `otherwise` when that does not come up. Whoever
        ends the process meanwhile wins."""
        if not self.stopping.is_set():
            self.stop(reason)
            self.successor, self.otherwise = successor, otherwise

    def stop(self, reason: str, *, drain: bool = True, exit_code: int = 0) -> None:
        """Begin the end of the process; a second call (or drain=False) ends the drain. Never blocks."""
        self.successor = None
        self.exit_code = self.exit_code or exit_code
        if not drain or self.stopping.is_set():
            self._no_drain.set()
        if not self.stopping.is_set():
            _log.info("stopping", reason=reason, drain=not self._no_drain.is_set())
            self.stopping.set()
        self._arm(self.settings.close_seconds + (0 if self._no_drain.is_set() else self.settings.drain_seconds))

    def _arm(self, seconds: float) -> None:
        """The last resort runs on a thread of its own, as the event loop may be what hangs."""
        with self._arming:
            if self._hard_timer is not None:
                self._hard_timer.cancel()
            self._hard_timer = threading.Timer(seconds + 1.0, self._hard_exit, (EXIT_HARD,))
            self._hard_timer.daemon = True
            self._hard_timer.start()

    def _disarm(self) -> None:
        with self._arming:
            if self._hard_timer is not None:
                self._hard_timer.cancel()

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _tell("background task failed", error, task=task.get_name())
            self.stop(f"task {task.get_name()} failed", drain=False, exit_code=EXIT_FAILED)

    async def run(self, start: Callable[[Lifecycle], Awaitable[None]]) -> int:
        """Start, wait for the end, end; returns the exit status."""
        starting: asyncio.Future[Any] = asyncio.ensure_future(start(self))
        stopped: asyncio.Future[Any] = asyncio.ensure_future(self.stopping.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
        begun: BaseException | None = (await asyncio.gather(starting, return_exceptions=True))[0]
        if begun is not None:
            if not isinstance(begun, asyncio.CancelledError):
                _tell("start failed", begun)
                self.failure = begun
                self.exit_code = EXIT_FAILED
            self.stop("start did not complete", drain=False)
        await stopped
        await self._end()
        return self.exit_code

    async def _end(self) -> None:
        for name, step in self._accepting:
            await self._step("stop accepting", name, step)
        if self._draining and not self._no_drain.is_set():
            await self._drain()
        for task in tuple(self._tasks):
            task.cancel()
        for name, step in reversed(self._closing):
            await self._step("close", name, step)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._disarm()
        _log.info("stopped", exit_code=self.exit_code)

    async def _drain(self) -> None:
        work: asyncio.Future[Any] = asyncio.gather(*(self._step("drain", name, step) for name, step in self._draining))
        hurry: asyncio.Future[Any] = asyncio.ensure_future(self._no_drain.wait())
        await asyncio.wait((work, hurry), timeout=self.settings.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not work.done():
            _log.warning("drain ended early", hurried=self._no_drain.is_set(), seconds=self.settings.drain_seconds)
            work.cancel()
        await asyncio.gather(work, hurry, return_exceptions=True)

    async def _step(self, phase: str, name: str, step: Step) -> None:
        """One step; its failure is told and sets the exit status, and the other steps still run."""
        try:
            await step()
        except Exception:  # noqa: BLE001 - the boundary: whatever one step raises, the others must release theirs
            _log.error("step failed", phase=phase, step=name, exc_info=True)
            self.exit_code = self.exit_code or EXIT_FAILED


def _tell(what: str, error: BaseException, **fields: str) -> None:
    """Typed errors and the system's own say what to do next; only a defect needs its traceback."""
    if isinstance(error, OSError) or type(error).__module__.startswith("headrace."):
        _log.error(what, error=str(error), **fields)
    else:
        _log.error(what, exc_info=error, **fields)


def run_service(start: Start, settings: StopSettings) -> int:
    """Run one process until a signal, its parent's death or a failed background task; returns the exit status.

    Uses uvloop where it is installed. To be called from the main thread.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Process(settings).run(start))


async def _start_and_settle(start: Start, life: Lifecycle) -> None:
    """What stands after the start stands until this life's end: collections of garbage, which hold everything up, need
    not look through it each time (some 100,000 objects of modules, 50 ms)."""
    await start(life)
    gc.collect()
    gc.freeze()


class _Process:
    """One life after another; signals and the parent's death end the one that is."""

    def __init__(self, settings: StopSettings) -> None:
        self._settings = settings
        self._life = Lifecycle(settings)

    async def run(self, start: Start) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number.name)
        parent = self._settings.parent_pid
        if parent is not None and not watch_parent(parent, lambda: self._parent_died(loop)):
            _log.error("the parent is gone", parent_pid=parent)
            return EXIT_FAILED
        otherwise: Otherwise | None = None
        while True:
            life = self._life
            code = await life.run(partial(_start_and_settle, start))
            if life.failure is not None and otherwise is not None:
                start, otherwise = otherwise(life.failure), None
            elif code == 0 and life.successor is not None:
                start, otherwise = life.successor, life.otherwise
            else:
                return code
            self._life = Lifecycle(self._settings)
            del life
            # Pools and regions of the former life hang in cycles, and are the larger part of a process.
            gc.unfreeze()
            gc.collect()

    def _signalled(self, name: str) -> None:
        self._life.stop(name)

    def _parent_died(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs on the watching thread; arms the hard exit itself, as the loop may hang."""
        life = self._life
        life._arm(life.settings.close_seconds)
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: self._life.stop("parent died", drain=False, exit_code=EXIT_FAILED))


def watch_parent(pid: int, died: Callable[[], None]) -> bool:
    """Call `died` on a daemon thread when the parent process `pid` ends; False when it is not our parent any more.

    A process descriptor is used, not PR_SET_PDEATHSIG: that signal is sent when the *thread* that started us ends, and
    is lost when the parent died before we asked for it.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    if os.getppid() != pid:
        os.close(descriptor)
        return False

    def wait() -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.poll()
        os.close(descriptor)
        died()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
    return True


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform != "linux":
        return None
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
