"""What is open: pushes, transfers, notices; shared by callers and the transfer thread.

Counts are sizes of live sets (L11).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from headrace.kvcache.handle import Handle
from headrace.kvcache.last_keys import LastKeys
from headrace.kvcache.transfer.copies import Copy
from headrace.kvcache.transfer.errors import EngineClosed, PushRefused, Refusal, TransferBusy
from headrace.kvcache.transfer.outbound import Outgoing, TransferKey
from headrace.kvcache.transfer.pushes import Outcome, Push, RowMove, TerminalNotice
from headrace.kvcache.transfer.wire_job import PushState

REMEMBERED = 1 << 16
"""Ended transfers and departed incarnations that are still told apart from unknown ones."""


@dataclass
class Totals:
    """Since start."""

    done: int = 0
    failed: int = 0
    copies_done: int = 0
    copies_failed: int = 0
    bytes_copied: int = 0
    bytes_sent: int = 0
    notices_sent: int = 0
    notices_received: int = 0
    notices_undelivered: int = 0


class Ledger:
    """Every method holds the lock for a few dictionary operations only."""

    def __init__(self, max_pushes: int) -> None:
        self._max_pushes = max_pushes
        self._lock = threading.Lock()
        self._closed = False
        self._live: dict[Push, None] = {}
        self._copies: dict[Copy, None] = {}
        self._transfers: dict[TransferKey, Outgoing] = {}
        self._ended: LastKeys[TransferKey] = LastKeys(REMEMBERED)
        self._departed: LastKeys[str] = LastKeys(REMEMBERED)
        self._expected: set[str] = set()
        self._notices: deque[TerminalNotice] = deque()
        self.totals = Totals()

    # --- pushes and transfers ----------------------------------------------------------------------------------

    def admit(self, push: Push, moves: Sequence[RowMove], *, last: bool, enqueue: Callable[[Outgoing], None]) -> None:
        """Count the push under its transfer and hand it on, in one step, so that none is counted after the close.

        Raises EngineClosed, TransferBusy, PushRefused (nothing is changed).
        """
        handle = push.handle
        written = {(move.target.value, item) for move in moves for item in move.target_items}
        key = transfer_key(handle)
        with self._lock:
            if self._closed:
                raise EngineClosed("the transfer engine is closed")
            self._check_room()
            record = self._transfers.get(key)
            if key in self._ended or (record is not None and record.ended is not None):
                raise PushRefused(
                    Refusal.ENDED, f"transfer {handle.transfer_id} has ended; reserve again for a new handle"
                )
            if record is not None and record.handle != handle:
                raise PushRefused(
                    Refusal.CONFLICT, f"another handle carries transfer id {handle.transfer_id}; discard both"
                )
            if record is not None and written & record.written:
                raise PushRefused(
                    Refusal.CONFLICT,
                    f"transfer {handle.transfer_id} pushed these landing rows before; reserve again for a new handle",
                )
            record = self._transfers.setdefault(key, Outgoing(handle))
            record.written |= written
            record.active += 1
            if last:
                record.ended = Outcome.OK
            self._live[push] = None
            enqueue(record)

    def settled(self, push: Push, record: Outgoing) -> bool:
        """The push is terminal. True when its transfer now owes its terminal notice."""
        with self._lock:
            del self._live[push]
            record.active -= 1
            if push.state is PushState.DONE:
                self.totals.done += 1
                self.totals.bytes_sent += push.nbytes
                record.landed_bytes += push.nbytes
            else:
                self.totals.failed += 1
                record.failed = True
            return record.active == 0 and record.ended is not None

    def ending(self, handle: Handle, outcome: Outcome, enqueue: Callable[[Outgoing], None]) -> Future[None]:
        """The owner has no more to push: hand the record on for its terminal notice, unless it was sent before."""
        said: Future[None] = Future()
        said.set_running_or_notify_cancel()
        key = transfer_key(handle)
        with self._lock:
            if key in self._ended:
                said.set_result(None)
                return said
            if self._closed:
                raise EngineClosed("the transfer engine is closed")
            record = self._transfers.setdefault(key, Outgoing(handle))
            record.ended = record.ended or outcome
            record.waiting.append(said)
            enqueue(record)
        return said

    def owes_notice(self, record: Outgoing) -> bool:
        with self._lock:
            return record.active == 0 and record.ended is not None and record.key in self._transfers

    def ended(self, record: Outgoing, error: Exception | None) -> None:
        """The terminal notice went out, or cannot (error)."""
        with self._lock:
            del self._transfers[record.key]
            self._ended.add(record.key)
            if error is None:
                self.totals.notices_sent += 1
            else:
                self.totals.notices_undelivered += 1
            waiting = tuple(record.waiting)
        for said in waiting:
            if error is None:
                said.set_result(None)
            else:
                said.set_exception(error)

    def transfers_to(self, incarnation: str) -> tuple[Outgoing, ...]:
        with self._lock:
            return tuple(record for key, record in self._transfers.items() if key[0] == incarnation)

    # --- copies --------------------------------------------------------------------------------------------------

    def admit_copy(self, copy: Copy, enqueue: Callable[[], None]) -> None:
        """Count the copy and hand it on. Raises EngineClosed, TransferBusy."""
        with self._lock:
            if self._closed:
                raise EngineClosed("the transfer engine is closed")
            self._check_room()
            self._copies[copy] = None
            enqueue()

    def settled_copy(self, copy: Copy) -> None:
        """The copy is terminal."""
        with self._lock:
            del self._copies[copy]
            if copy.state is PushState.DONE:
                self.totals.copies_done += 1
                self.totals.bytes_copied += copy.nbytes
            else:
                self.totals.copies_failed += 1

    @property
    def open_copies(self) -> int:
        return len(self._copies)

    def _check_room(self) -> None:
        count = len(self._live) + len(self._copies)
        if count >= self._max_pushes:
            raise TransferBusy(f"{count} pushes and copies are not terminal yet; wait for one, then try again")

    # --- incarnations ------------------------------------------------------------------------------------------

    def depart(self, incarnation: str) -> None:
        with self._lock:
            self._departed.add(incarnation)

    def has_departed(self, incarnation: str) -> bool:
        with self._lock:
            return incarnation in self._departed

    # --- notices -----------------------------------------------------------------------------------------------

    def expect(self, transfer_id: str) -> None:
        with self._lock:
            self._expected.add(transfer_id)

    def forget(self, transfer_id: str) -> None:
        with self._lock:
            self._expected.discard(transfer_id)

    @property
    def expects_any(self) -> bool:
        return bool(self._expected)

    def received(self, notice: TerminalNotice) -> None:
        with self._lock:
            self._notices.append(notice)
            self._expected.discard(notice.transfer_id)
            self.totals.notices_received += 1

    def take_notices(self) -> list[TerminalNotice]:
        with self._lock:
            taken = list(self._notices)
            self._notices.clear()
        return taken

    # --- whole -------------------------------------------------------------------------------------------------

    def submit(self, enqueue: Callable[[], None]) -> None:
        """Hand a command on. Raises EngineClosed."""
        with self._lock:
            if self._closed:
                raise EngineClosed("the transfer engine is closed")
            enqueue()

    def close(self, enqueue: Callable[[], None] | None = None) -> None:
        """Admit nothing more; ``enqueue`` is called the first time, behind everything that was admitted."""
        with self._lock:
            if not self._closed and enqueue is not None:
                enqueue()
            self._closed = True

    @property
    def is_closed(self) -> bool:
        return self._closed

    def states(self) -> list[PushState]:
        """Of every push that is not terminal."""
        with self._lock:
            return [push.state for push in self._live]

    @property
    def open_transfers(self) -> int:
        return len(self._transfers)


def transfer_key(handle: Handle) -> TransferKey:
    return handle.incarnation, handle.rank, handle.transfer_id
