"""The mount as it is now: its connection, whether it can be asked, and the thread that brings it back.

Every call that goes to the mount is watched: what happens to it tells the breaker. A timeout makes the keeper ask the
FUSE process whether it is there at all; while the breaker is open the keeper probes with new rings.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from headrace.kvcache.store.threefs.abi import Library
from headrace.kvcache.store.threefs.bounded import BoundedCalls
from headrace.kvcache.store.threefs.breaker import CircuitBreaker
from headrace.kvcache.store.threefs.connection import Connection, is_gone
from headrace.kvcache.store.threefs.names import Names
from headrace.kvcache.store.threefs.settings import ThreeFsSettings

T = TypeVar("T")

_LEAST_WAIT_S = 0.02
"""A call that was given less than this says nothing about the mount when it times out."""
_LOOK_S = 1.0
_RETIRE_S = 60.0
_NO_ANSWER = frozenset({errno.ETIMEDOUT, errno.EREMOTEIO, errno.EBUSY})
"""Nothing came in time, an RPC behind the mount failed, or what did not come holds every buffer."""


class Mount:
    """Thread-safe."""

    def __init__(
        self, root: str, settings: ThreeFsSettings, library: Library, names: Names, calls: BoundedCalls
    ) -> None:
        """Connects and probes. OSError if that fails."""
        self._root = root
        self._settings = settings
        self._library = library
        self._names = names
        self._calls = calls
        self._wake = threading.Event()
        self._suspect = False
        self._closed = False
        self._retiring: threading.Thread | None = None
        self.breaker = CircuitBreaker(settings.breaker, time.monotonic, self._wake.set)
        self.connections = 1
        """Made since the start: 1 plus one for each time the mount came back."""
        self.connection = calls.run(self._connect, time.monotonic() + settings.connect_timeout_s, undo=_close)
        self._keeper = threading.Thread(target=self._keep, name="3fs-keeper", daemon=True)
        self._keeper.start()

    def watched(self, work: Callable[[], T], deadline: float) -> T:
        """`work()`, which keeps `deadline` (time.monotonic seconds) itself. OSError(ENOTCONN), at once, while the mount
        counts as gone."""
        if not self.breaker.allows():
            raise OSError(errno.ENOTCONN, "the 3FS mount is gone; it is tried again in the background")
        given = deadline - time.monotonic()
        try:
            result = work()
        except OSError as error:
            if is_gone(error):
                self.breaker.trip()
            elif error.errno not in _NO_ANSWER:
                self.breaker.answered()
            elif given >= _LEAST_WAIT_S:
                self.breaker.timed_out()
                self._suspect = True
                self._wake.set()
            raise
        self.breaker.answered()
        return result

    def close(self) -> None:
        """Stop the keeper and give the rings back, if the mount lets us. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._keeper.join(1.0)
        if self._retiring is not None:
            self._retiring.join(1.0)
        with contextlib.suppress(OSError):
            self._calls.run(lambda: _close(self.connection), time.monotonic() + self._settings.name_timeout_s)

    def _connect(self) -> Connection:
        """May hang with the mount."""
        if not self._answers():
            raise OSError(errno.ENODEV, f"{self._root} is not on a live 3FS")
        connection = Connection(self._library, self._root, self._settings)
        try:
            connection.probe(self._names, self._root, self._settings.name_timeout_s)
        except OSError:
            _close(connection)
            raise
        return connection

    def _answers(self) -> bool:
        fd = self._names.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return self._library.is_3fs(fd)
        finally:
            self._names.close(fd)

    def _keep(self) -> None:
        while not self._closed:
            self._wake.wait(self.breaker.probe_in())
            self._wake.clear()
            if self._suspect:
                self._suspect = False
                self._look()
            if not self._closed and self.breaker.begin_probe():
                self.breaker.end_probe(self._reconnect())

    def _look(self) -> None:
        """After a timeout: does the FUSE process answer at all? If not there is no need for more timeouts."""
        try:
            alive = self._calls.run(self._answers, time.monotonic() + _LOOK_S)
        except OSError as error:
            alive = error.errno == errno.EBUSY  # not asked: every thread is waiting for the mount
        if not alive:
            self.breaker.trip()

    def _reconnect(self) -> bool:
        try:
            fresh = self._connect()
        except OSError:
            return False
        old, self.connection = self.connection, fresh
        self.connections += 1
        # On a thread of its own, since the names of the old rings may hang with what is left of the old mount.
        self._retiring = threading.Thread(target=_close, args=(old,), name="3fs-retire", daemon=True)
        self._retiring.start()
        return True


def _close(connection: Connection) -> None:
    """Best effort: names of a mount that is gone cannot be removed, and went with it."""
    with contextlib.suppress(OSError):
        connection.close(_RETIRE_S)
