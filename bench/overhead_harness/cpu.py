"""CPU time of processes and their threads, from /proc: where the time of a phase went, without a profiler."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of CPU since the start of each thread, by process name and thread id."""

    threads: Mapping[str, Mapping[int, float]]

    @classmethod
    def now(cls, pids: Mapping[str, int]) -> CpuTimes:
        """Read all threads of the named processes."""
        return cls({name: _threads(pid) for name, pid in pids.items()})

    def since(self, before: CpuTimes, seconds: float) -> dict[str, dict[str, float]]:
        """Share of one core, by process: the whole, its busiest thread (in a worker the engine's) and the rest."""
        shares = {}
        for name, threads in self.threads.items():
            used = [spent - before.threads[name].get(thread, 0.0) for thread, spent in threads.items()]
            whole, most = sum(used), max(used, default=0.0)
            shares[name] = {
                "all": round(whole / seconds, 3),
                "busiest_thread": round(most / seconds, 3),
                "other_threads": round((whole - most) / seconds, 3),
            }
        return shares


def _threads(pid: int) -> dict[int, float]:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            fields = (task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended meanwhile
        found[int(task.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found
