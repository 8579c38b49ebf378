"""The processes of the cluster, from outside: alive, the same, level, silent, and at the end empty."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import ssl
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from headrace.cli.certificates import files_of
from headrace.cli.client_tls import TLS_FOLDER
from headrace.v1 import control_pb2, registry_pb2
from tests.fuzz.world import WORKERS, World
from tests.services.cluster import busy

PROCESSES: Final = ("router-0", *WORKERS)
IDLE_S: Final = 120.0
"""Longest wait until everything is given back."""
MESSAGES: Final = re.compile(r'^headrace_rpc_messages_total\{method="/([^"]+)"\} ([0-9.e+]+)$', re.MULTILINE)
BAD_LEVELS: Final = ("error", "critical")
FD_SLACK: Final = 32
"""Descriptors that connections, threads and open segments of the store may add."""
SHM_SLACK: Final = 8


@dataclass
class Life:
    """A process at one moment."""

    pid: int
    incarnation: str
    rss: int
    fds: int
    cpu_s: float
    shm: int
    """Segments of shared memory that it maps."""


@dataclass
class Watch:
    """Compares later moments with the first."""

    world: World
    first: dict[str, Life] = field(default_factory=dict)
    warm: dict[str, Life] = field(default_factory=dict)
    """After some load, when caches and arenas have their size."""
    expected_lives: set[str] = field(default_factory=set)
    """Processes whose incarnation may have changed since: a change of role is a new one."""
    _gone: dict[str, Counter[str]] = field(default_factory=dict)
    """Of processes that began a new life: what the lives before it counted."""
    _read: dict[str, int] = field(default_factory=dict)
    """How far each log has been read."""

    async def begin(self) -> None:
        self.first = await self._lives()

    async def note_warm(self) -> None:
        self.warm = await self._lives()

    async def _lives(self) -> dict[str, Life]:
        lives = {}
        for name in PROCESSES:
            pid = self.world.cluster.child(name).pid
            process = psutil.Process(pid)
            status = await self.world.status(name)
            incarnation = status.replica.peer.incarnation
            cpu_s = sum(process.cpu_times()[:2])
            rss, fds = process.memory_info().rss, process.num_fds()
            lives[name] = Life(pid, incarnation, rss, fds, cpu_s, shm_maps(pid))
        return lives

    # --- while it goes on --------------------------------------------------------------------------------------

    def dead(self) -> list[str]:
        """Processes that have ended."""
        return [f"{child.name} died with status {child.status}" for child in self.world.cluster.dead()]

    async def same(self) -> list[str]:
        """Processes that are not what they were."""
        if problems := self.dead():
            return problems
        lives = await self._lives()
        for name, life in lives.items():
            old = self.first[name]
            if life.pid != old.pid:
                problems.append(f"{name} has pid {life.pid}, not {old.pid}")
            if life.incarnation != old.incarnation:
                if name not in self.expected_lives:
                    problems.append(f"{name} began a new life, and nobody changed its role")
                old.incarnation = life.incarnation
        self.expected_lives.clear()
        return problems

    def logs(self) -> list[str]:
        """New lines of the logs that no message may cause: tracebacks, errors, fatal signals."""
        return [
            f"{child.name}: {line}"
            for child in self.world.cluster.children
            for line in bad_lines(self._news(child.name, child.log))
        ]

    def _news(self, name: str, log: Path) -> list[str]:
        data = log.read_bytes()
        end = data.rfind(b"\n") + 1
        start = self._read.get(name, 0)
        self._read[name] = end
        return data[start:end].decode("utf-8", "replace").splitlines()

    async def counters(self) -> dict[str, Counter[str]]:
        """Process → service/method → messages that its handlers were given, by the processes' own count."""
        found = {}
        for name in PROCESSES:
            endpoint = (await self.world.status(name)).replica.metrics_endpoint
            text = await asyncio.to_thread(self._scrape, endpoint)
            found[name] = Counter(
                {path.removeprefix("headrace.v1."): int(float(number)) for path, number in MESSAGES.findall(text)}
            )
            found[name].update(self._gone.get(name, Counter()))
        return found

    async def before_a_new_life(self, name: str) -> Counter[str]:
        """What a process has counted, asked before a message that may end its life: that message is added, as nobody
        can ask afterwards."""
        return (await self.counters())[name] + Counter({"ControlService/ChangeRole": 1})

    def began_a_new_life(self, name: str, counted: Counter[str]) -> None:
        """Its counters begin at nothing; `counted` is what they had."""
        self._gone[name] = counted
        self.expected_lives.add(name)

    def _scrape(self, endpoint: str) -> str:
        files = files_of(self.world.cluster.run_dir / TLS_FOLDER, "monitor")
        context = ssl.create_default_context(cafile=str(files.ca))
        context.load_cert_chain(files.cert, files.key)
        connection = http.client.HTTPSConnection(endpoint, context=context, timeout=30)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    # --- at the end --------------------------------------------------------------------------------------------

    async def leaks(self) -> list[str]:
        """What is still held when everything has had its time to end (L11)."""
        problems: list[str] = []
        for name in PROCESSES:
            if problem := await self._until_idle(name):
                problems.append(f"{name} is not idle: {problem}")
        members = (await self.world.status("router-0")).members
        names = sorted(member.peer.replica_id for member in members)
        if names != sorted(WORKERS) or any(one.state != registry_pb2.REPLICA_STATE_READY for one in members):
            problems.append(f"members are {[(one.peer.replica_id, one.state) for one in members]}")
        lives = await self._lives()
        for name, life in lives.items():
            if life.fds > self.first[name].fds + FD_SLACK:
                problems.append(f"{name} holds {life.fds} descriptors, {self.first[name].fds} at first")
            if life.shm > self.first[name].shm + SHM_SLACK:
                problems.append(f"{name} maps {life.shm} segments of shared memory, {self.first[name].shm} at first")
        return problems

    async def _until_idle(self, name: str) -> str:
        problem = ""
        for _ in range(int(IDLE_S / 0.25)):
            problem = held(await self.world.status(name, check=True))
            if not problem:
                return ""
            await asyncio.sleep(0.25)
        return problem

    async def growth(self) -> dict[str, dict[str, float]]:
        """Process → resident MiB when warm and now, descriptors at first and now."""
        lives = await self._lives()
        return {
            name: {
                "rss_warm_mib": round((self.warm or self.first)[name].rss / 2**20, 1),
                "rss_end_mib": round(life.rss / 2**20, 1),
                "fds_first": self.first[name].fds,
                "fds_end": life.fds,
                "cpu_s": round(life.cpu_s - self.first[name].cpu_s, 1),
            }
            for name, life in lives.items()
        }


def held(status: control_pb2.StatusResponse) -> str:
    """Why a process is not empty; empty when it is."""
    return busy(status) or ("" if status.ready else f"not ready: {status.unready_reason}")


def bad_lines(lines: list[str]) -> list[str]:
    """Lines of a JSON log that tell of a defect."""
    bad = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            # Not from the logger: an interpreter's last words, a library's.
            if re.search(r"Traceback|Fatal Python error|Segmentation fault|terminate called|Error\b", line):
                bad.append(line)
            continue
        if entry.get("level") in BAD_LEVELS or "exception" in entry:
            bad.append(line[:3000])
    return bad


def shm_maps(pid: int) -> int:
    """Segments of shared memory in a process's address space: files of /dev/shm, and System V's."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return len({line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line or "/SYSV" in line})
