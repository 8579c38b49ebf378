"""Calls that may hang, such as every name operation on a network mount whose server is gone (uninterruptible in the
kernel), made on a few threads of their own, so that the caller waits only until its deadline (L6).

A thread that hangs stays with its call until that returns; when all of them hang, further calls are refused at once.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Call(Generic[T]):
    def __init__(self, work: Callable[[], T], undo: Callable[[T], None] | None) -> None:
        self.work = work
        self.undo = undo
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.abandoned = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            result = self.work()
        except Exception as error:  # noqa: BLE001 - handed to the caller, whatever it is
            with self.lock:
                self.error = error
                self.done.set()
            return
        with self.lock:
            self.result = result
            self.done.set()
            late = self.abandoned
        if late and self.undo is not None:
            self.undo(result)


class BoundedCalls:
    """A few daemon threads. `run` raises TimeoutError at its deadline and OSError(EBUSY) when no thread is free."""

    def __init__(self, threads: int, name: str) -> None:
        if threads < 1:
            raise ValueError("threads must be at least 1")
        self._queue: queue.SimpleQueue[_Call[object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._busy = 0
        self._limit = threads
        self._threads = [threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> int:
        """Calls that run or hang now."""
        return self._busy

    def run(self, work: Callable[[], T], deadline: float, undo: Callable[[T], None] | None = None) -> T:
        """`work()`, or TimeoutError at `deadline` (time.monotonic seconds). What `work` returns after that is handed to
        `undo` (close a file that was opened too late)."""
        call = _Call(work, undo)
        with self._lock:
            if self._busy >= 4 * self._limit:  # running and queued: more would only wait behind the hanging ones
                raise OSError(errno.EBUSY, "every thread for name operations is waiting for the mount")
            self._busy += 1
        self._queue.put(call)  # type: ignore[arg-type]
        if not call.done.wait(max(0.0, deadline - time.monotonic())):
            with call.lock:
                if not call.done.is_set():
                    call.abandoned = True
                    raise TimeoutError(errno.ETIMEDOUT, "the mount did not answer by the deadline")
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]

    def start(self, work: Callable[[], None]) -> None:
        """Have `work` done without waiting for it. Its OSErrors are nobody's: for closing what is given up."""

        def quiet() -> None:
            with contextlib.suppress(OSError):
                work()

        with self._lock:
            self._busy += 1
        self._queue.put(_Call(quiet, None))

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                if not call.abandoned:
                    call.run()
            finally:
                with self._lock:
                    self._busy -= 1

    def close(self, timeout_s: float) -> bool:
        """Stop the threads; False when some still hang (they are daemons and end with the process)."""
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
