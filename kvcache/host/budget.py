"""The host's memory for host tiers, divided over its workers by one file (L29).

The budget comes from the cgroup, which is read by the first worker of a host only: what a later one read would count
the first one's memory again. So the file keeps the budget for as long as anybody lives who holds a share of it, and who
holds how much. A holder that is known to be dead (its PID is gone, or is another process's now) holds nothing any more;
one that is merely silent, or stopped, still does. Claims are serialised by flock, so that two workers starting at once
never get more than there is.

The directory belongs to one host: on a shared file system another host's workers would look like those of an earlier
boot.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.kvcache.process import Liveness, ProcessIdentity

POLL_S = 0.01
"""Between attempts at the lock: it is held for a millisecond, unless its holder was stopped meanwhile."""


class BudgetError(RuntimeError):
    """The division cannot be read or written; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker holds."""

    incarnation: str
    process: ProcessIdentity
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Division:
    limit_bytes: int
    shares: tuple[Share, ...]

    @property
    def held(self) -> int:
        return sum(share.nbytes for share in self.shares)


class HostBudget:
    """One worker's view of the division. `directory` is made when it is not there (mode 0700)."""

    def __init__(self, directory: Path, limit: Callable[[], int], *, lock_timeout_s: float = 5.0) -> None:
        """limit: bytes for all host tiers of this host together; called only where nobody holds a share yet."""
        self._directory = directory
        self._limit = limit
        self._lock_timeout_s = lock_timeout_s
        self._file = directory / "host-tier.json"

    def claim(self, incarnation: str, wanted: int, process: ProcessIdentity | None = None) -> int:
        """Take up to `wanted` bytes and return how many were given: what is left, if that is less. A second claim
        replaces the first of the same incarnation. `process` (default: this one) is whose death ends it.

        Raises BudgetError.
        """
        if wanted < 0:
            raise BudgetError(f"{wanted} bytes of host memory cannot be claimed")
        with self._locked():
            found = self._read()
            others = tuple(share for share in found.shares if share.incarnation != incarnation) if found else ()
            limit = found.limit_bytes if found is not None and others else self._limit()
            division = _Division(limit, others)
            given = max(0, min(wanted, limit - division.held))
            share = Share(incarnation, process or ProcessIdentity.own(), given)
            self._write(_Division(limit, (*others, share) if given else others))
            return given

    def release(self, incarnation: str) -> None:
        """Give the share back, after its memory; without one nothing happens. Raises BudgetError."""
        with self._locked():
            found = self._read()
            if found is not None:
                rest = tuple(share for share in found.shares if share.incarnation != incarnation)
                self._write(_Division(found.limit_bytes, rest))

    def shares(self) -> tuple[Share, ...]:
        """Of those who are not known to be dead. Raises BudgetError."""
        with self._locked():
            found = self._read()
            return found.shares if found is not None else ()

    # --- inside --------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The file itself is replaced at every write, so the lock is on one beside it."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._directory / "host-tier.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BudgetError(f"{self._directory} cannot be used ({error}): name another runtime directory") from error
        try:
            deadline = time.monotonic() + self._lock_timeout_s
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise BudgetError(
                            f"{self._directory}/host-tier.lock is held for {self._lock_timeout_s:g} s: its holder is "
                            f"stopped; continue it or end it"
                        ) from None
                    time.sleep(POLL_S)
            yield
        finally:
            os.close(lock)

    def _read(self) -> _Division | None:
        """The division without the dead; None where there is none."""
        try:
            text = self._file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            data = json.loads(text)
            shares = [
                Share(each["incarnation"], ProcessIdentity(**each["process"]), each["nbytes"])
                for each in data["shares"]
            ]
            limit = int(data["limit_bytes"])
        except (ValueError, KeyError, TypeError) as error:
            raise BudgetError(f"{self._file} is not ours ({error}): remove it while no worker runs") from error
        boot = ProcessIdentity.own().boot_id
        alive = [
            share for share in shares if share.process.boot_id == boot and share.process.liveness() is not Liveness.DEAD
        ]
        return _Division(limit, tuple(alive))

    def _write(self, division: _Division) -> None:
        # Replaced, not overwritten: a writer killed half-way leaves the division that was there.
        fresh = self._file.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(asdict(division)), encoding="utf-8")
            fresh.replace(self._file)
        except OSError as error:
            raise BudgetError(f"{self._file} cannot be written ({error}): name another runtime directory") from error
