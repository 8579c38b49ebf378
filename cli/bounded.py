"""Many blocking calls, so many at a time: overload and absence are waited out, Ctrl-C loses nothing that has come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.services.runtime.errors import HeadraceError, ResourceExhausted, Unauthenticated, Unavailable

Answer = TypeVar("Answer")
FATAL = (Unavailable, ResourceExhausted, Unauthenticated)
"""Say nothing of the one request: all that follow would end alike."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0


@dataclass
class Bounded(Generic[Answer]):
    """A way to make `count` calls."""

    call: Callable[[int], Answer]
    """Blocks; raises HeadraceError. Called from several threads."""
    settle: Callable[[int, Answer | HeadraceError], None]
    """Gets each result, one at a time."""
    cancel: Callable[[], None]
    """Makes calls under way end soon."""
    concurrency: int
    patience_s: float
    """How long one request is repeated while nobody can take it."""

    def run(self, count: int) -> None:
        """Make all calls. Raises the HeadraceError after which none could be made; those not settled are left."""
        self._stop = threading.Event()
        self._settling = threading.Lock()
        self._fatal: list[HeadraceError] = []
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="ask")
        try:
            for future in as_completed([pool.submit(self._one, index) for index in range(count)]):
                future.result()
        except BaseException:
            self._stop.set()
            self.cancel()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        if self._fatal:
            raise self._fatal[0]

    def _one(self, index: int) -> None:
        if self._stop.is_set():
            return
        try:
            outcome: Answer | HeadraceError = self._repeated(index)
        except HeadraceError as error:
            if self._stop.is_set():
                return
            if isinstance(error, FATAL):
                self._fatal.append(error)
                self._stop.set()
                return
            outcome = error
        except ValueError:  # grpc's word for a channel that `cancel` has closed
            if self._stop.is_set():
                return
            raise
        with self._settling:
            self.settle(index, outcome)

    def _repeated(self, index: int) -> Answer:
        waited, pause = 0.0, FIRST_PAUSE_S
        while True:
            try:
                return self.call(index)
            except (ResourceExhausted, Unavailable) as error:
                wait = pause if error.retry_after_s is None else error.retry_after_s
                if waited + wait > self.patience_s or self._stop.wait(wait):
                    raise
                waited += wait
                pause = min(2 * pause, LONGEST_PAUSE_S)
