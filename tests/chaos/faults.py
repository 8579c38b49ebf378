"""Does what the schedule says, each fault as soon as its role keeps a sound replica and somebody is in flight there."""

from __future__ import annotations

import asyncio
import errno
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from bench.tier_harness.processes import Server
from tests.chaos.processes import ChaosCluster
from tests.chaos.schedule import CLOCK, DISK, ETCD, REDIS, Fault, Kind
from tests.chaos.servers import wait_until_healthy

AIM_S = 6.0
"""Longest wait for a request in flight at the target."""
LOOK_S = 0.03
RETURN_S = 180.0
"""Longest return of a process, on a busy machine."""
BALLAST = "ballast"


@dataclass(frozen=True)
class Done:
    """A fault that was done."""

    fault: Fault
    at: float
    """By the monotonic clock."""
    in_flight: int
    """Requests at the target at that moment."""
    incarnation: str
    """Of the target; empty where it has none."""


class Faults:
    """One round's."""

    def __init__(
        self,
        cluster: ChaosCluster,
        through_router: Callable[[str], int],
        plan: Sequence[Fault],
        told: Callable[[str], None],
    ) -> None:
        """`through_router`: requests that clients have open through a router. `told`: progress lines."""
        self._cluster = cluster
        self._through_router = through_router
        self._plan = plan
        self._told = told
        self.done: list[Done] = []
        self.left_out: dict[str, int] = {}
        """Reason → faults."""

    async def run(self, begun: float, seconds: float) -> None:
        """All lanes, `seconds` at most; what has begun is healed before this returns."""
        lanes: dict[str, list[Fault]] = {}
        for fault in self._plan:
            lanes.setdefault(fault.lane, []).append(fault)
        await asyncio.gather(*(self._lane(lane, begun, begun + seconds) for lane in lanes.values()))

    async def _lane(self, faults: Sequence[Fault], begun: float, end: float) -> None:
        for fault in faults:
            await asyncio.sleep(max(0.0, begun + fault.at_s - time.monotonic()))
            reason = self._impossible(fault)
            if not reason and not await self._permitted(fault, end):
                reason = "its time was over"
            if reason:
                self.left_out[reason] = self.left_out.get(reason, 0) + 1
                continue
            await self._do(fault)

    def _impossible(self, fault: Fault) -> str:
        if fault.kind is Kind.CLOCK_JUMP:
            return self._cluster.clock.reason
        if fault.kind is Kind.DISK_FULL and not self._cluster.store.is_mount():
            return "the store has no file system of its own (needs root)"
        return ""

    async def _permitted(self, fault: Fault, end: float) -> bool:
        if fault.target not in self._cluster.processes:
            return time.monotonic() < end
        target = self._cluster.processes[fault.target]
        while time.monotonic() < end:
            if not target.touched and self._cluster.ready(target.name) and self._cluster.spares(target.name):
                target.touched = True
                return True
            await asyncio.sleep(0.1)
        return False

    async def _in_flight(self, name: str) -> tuple[int, str]:
        """Requests at a process, and its incarnation; waits a while for one."""
        process, until = self._cluster.processes[name], time.monotonic() + AIM_S
        while True:
            count, incarnation = 0, ""
            try:
                status = await process.ask(timeout_s=2.0)
                count, incarnation = status.requests.live, status.replica.peer.incarnation
            except grpc.aio.AioRpcError:
                await asyncio.sleep(LOOK_S)
            if process.role == "router":
                count = self._through_router(name)
            if count or time.monotonic() > until:
                return count, incarnation
            await asyncio.sleep(LOOK_S)

    async def _do(self, fault: Fault) -> None:
        process = self._cluster.processes.get(fault.target)
        count, incarnation = (0, "") if process is None else await self._in_flight(fault.target)
        self.done.append(Done(fault, time.monotonic(), count, incarnation))
        what = fault.spoil.value if fault.kind is Kind.WIRE else fault.kind.value
        self._told(f"{what} {fault.target} ({fault.seconds:g} s, {count} in flight)")
        if process is None:
            await self._elsewhere(fault)
            return
        try:
            if fault.kind is Kind.KILL:
                await self._kill(fault)
            elif fault.kind is Kind.STOP:
                await self._stop(fault)
            else:
                process.proxy.begin(fault.spoil, delay_s=0.3, towards_server=fault.towards_server)
                await asyncio.sleep(fault.seconds)
                process.proxy.heal()
            if not await self._cluster.until_ready([fault.target], RETURN_S):
                self._cluster.problems.append(f"{fault.target} did not come back from {what}")
        finally:
            process.touched = False

    async def _kill(self, fault: Fault) -> None:
        process = self._cluster.processes[fault.target]
        assert process.child is not None
        process.child.kill()
        await process.ended(10.0)
        await asyncio.sleep(fault.seconds)
        await self._cluster.spawn(fault.target)

    async def _stop(self, fault: Fault) -> None:
        process = self._cluster.processes[fault.target]
        assert process.child is not None
        process.stopped = True
        process.child.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            process.child.send_signal(signal.SIGCONT)
            process.stopped = False
        # What its routers or the registry make of its silence takes a moment to show.
        await asyncio.sleep(1.0)

    async def _elsewhere(self, fault: Fault) -> None:
        if fault.lane in (ETCD, REDIS):
            await self._hurt_servers(fault)
        elif fault.lane == DISK:
            await asyncio.to_thread(fill, self._cluster.store / BALLAST)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                (self._cluster.store / BALLAST).unlink()
        elif fault.lane == CLOCK:
            self._cluster.clock.move(fault.jump_s)

    async def _hurt_servers(self, fault: Fault) -> None:
        """All of a kind at once, or, of etcd, one member after another, so that two serve all the time."""
        servers = self._cluster.servers_of(fault.lane)
        if fault.kind is Kind.STOP:
            try:
                for server in servers:
                    await asyncio.to_thread(server.freeze)
                await asyncio.sleep(fault.seconds)
            finally:
                for server in servers:
                    server.thaw()
            return
        groups = [[server] for server in servers] if fault.kind is Kind.IN_TURN else [servers]
        for group in groups:
            for server in group:
                await asyncio.to_thread(server.kill)
            await asyncio.sleep(fault.seconds)
            for server in group:
                server.start()
            for server in group:
                listens = wait_until_healthy if fault.lane == ETCD else Server.wait_until_it_listens
                await asyncio.to_thread(listens, server)


def fill(path: Path) -> None:
    """Take all that is left of a file system."""
    piece = bytes(1 << 20)
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                if file.write(piece) == 0:
                    return
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                if len(piece) == 1:
                    return
                piece = piece[: max(1, len(piece) // 16)]
