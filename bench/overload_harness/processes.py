"""What a cluster's processes use: resident memory over time, and CPU beside what everybody else takes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

PERIOD_S = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")


def resident_kib(pid: int) -> int:
    """VmRSS of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process since its start."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def machine_seconds() -> float:
    """CPU time that everybody took since boot, over all cores."""
    user, nice, system, _, _, irq, soft = Path("/proc/stat").read_text(encoding="utf-8").split()[1:8]
    return sum(map(int, (user, nice, system, irq, soft))) / _TICKS


@dataclass(frozen=True)
class CpuMark:
    """A moment."""

    own: float
    """CPU seconds of the cluster and of this process, which has the clients."""
    everybody: float

    @classmethod
    def take(cls, pids: Mapping[str, int]) -> CpuMark:
        return cls(sum(cpu_seconds(pid) for pid in (*pids.values(), os.getpid())), machine_seconds())

    def since(self, before: CpuMark) -> CpuMark:
        return CpuMark(self.own - before.own, self.everybody - before.everybody)

    @property
    def share(self) -> float:
        """The cluster's part of the CPU time that was taken: well below 1, others used the machine, too."""
        return self.own / self.everybody if self.everybody else 1.0


class MemoryWatch:
    """Samples from `run` on, until it is cancelled."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self.samples: dict[str, list[int]] = {name: [] for name in pids}
        """By process, KiB."""

    async def run(self) -> None:
        while True:
            for name, pid in self._pids.items():
                self.samples[name].append(resident_kib(pid))
            await asyncio.sleep(PERIOD_S)

    def growth(self) -> dict[str, float]:
        """Last fifth over second fifth (the first warms up), by process; 1.0 for too few samples."""
        found = {}
        for name, kib in self.samples.items():
            fifth = len(kib) // 5
            found[name] = median(kib[-fifth:]) / median(kib[fifth : 2 * fifth]) if fifth else 1.0
        return found
