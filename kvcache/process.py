"""One process, told from every other, and whether it is known to be dead.

Death frees what a process held (L6, L8), so it needs evidence: silence is none, a stopped process is alive. On one host
the kernel knows; of another host's process nothing is known here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_PROC = Path("/proc")


class Liveness(StrEnum):
    """What this host can say of a process."""

    ALIVE = "alive"
    """Running or stopped: it may still write."""
    DEAD = "dead"
    """Gone, all its threads with it."""
    UNKNOWN = "unknown"
    """It is elsewhere."""


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, never confused with a later one of the same PID."""

    boot_id: str
    """Of the kernel: tells hosts, and boots of a host, apart."""
    pid_namespace: str
    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat."""

    @classmethod
    def own(cls) -> ProcessIdentity:
        boot_id, namespace = _here()
        pid = os.getpid()
        stat = _read_stat(pid)
        if stat is None:
            raise RuntimeError("/proc is not mounted: transfers need it to tell dead peers from stopped ones")
        return cls(boot_id, namespace, pid, stat[1])

    @property
    def elsewhere(self) -> bool:
        """On another host, or in another namespace of processes: no memory is shared with it, and nothing can be known
        of its death."""
        return (self.boot_id, self.pid_namespace) != _here()

    def liveness(self) -> Liveness:
        """DEAD only on evidence."""
        if self.elsewhere:
            return Liveness.UNKNOWN
        stat = _read_stat(self.pid)
        if stat is None or stat[1] != self.start_ticks:
            return Liveness.DEAD
        if stat[0] not in "ZX":
            return Liveness.ALIVE
        # A zombie leader may have threads that are still in a system call.
        try:
            threads = os.listdir(_PROC / str(self.pid) / "task")
        except FileNotFoundError:
            return Liveness.DEAD
        return Liveness.DEAD if set(threads) <= {str(self.pid)} else Liveness.ALIVE

    def encode(self) -> bytes:
        return f"{self.boot_id} {self.pid_namespace} {self.pid} {self.start_ticks}".encode()

    @classmethod
    def decode(cls, data: bytes) -> ProcessIdentity:
        """Raises ValueError."""
        parts = data.decode("ascii", "replace").split(" ")
        if len(parts) != 4:
            raise ValueError("process identity needs four fields")
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]))


def _here() -> tuple[str, str]:
    boot_id = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot_id, os.readlink(_PROC / "self/ns/pid")


def _read_stat(pid: int) -> tuple[str, int] | None:
    """(state, start ticks), or None when there is no such process. The name in it may hold spaces and brackets."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])
