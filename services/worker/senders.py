"""Whose writes may still land here, and when a sender is known to be dead (L6).

A member that left the registry may be a stopped process, and a stopped process is alive: its posted write lands when
it continues (spec/protocol.md). So its departure only makes it a suspect. What its transfers may write stays in
quarantine until the kernel of this host says that the process is gone; of another host's process nothing is known
here. If it can write by nothing but streams, which this side writes out itself, those are closed once it has been away
for LEFT_S, and its rows are free; else they wait for its notice or for a rebuilt landing region.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, Protocol

from google.protobuf.message import DecodeError

from headrace.kvcache.transfer.peers import Liveness, ProcessIdentity
from headrace.kvcache.transfer.wire import MalformedBytes, decode_envelope
from headrace.services.runtime import logs
from headrace.services.runtime.ids import short
from headrace.services.runtime.registry.base import CHANGEABLE_ROLES, Registry, Removed, Replica, Role
from headrace.v1 import common_pb2

_log = logs.get(__name__)
POLL_S = 0.1
"""How often the kernel is asked about suspects, on a clock of its own (L9)."""
LEFT_S = 10.0
"""How long a sender of another host may be away before its streams are closed: it may have lost the registry only."""


class OnLeft(Protocol):
    """`sender_left` of the transfer engine."""

    def __call__(self, incarnation: str, *, elsewhere: bool) -> int: ...


class _Suspect(NamedTuple):
    """A former member that is not known to be dead."""

    processes: tuple[ProcessIdentity, ...]
    since: float
    """When it left."""


class SenderWatch:
    """Follows members of one role and tells when one of them is dead. Two background tasks of a process."""

    def __init__(
        self,
        role: Role,
        on_dead: Callable[[str], Awaitable[None]],
        on_left: OnLeft | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_dead` gets the incarnation, once, on evidence; `on_left` one of which there will be none."""
        self._on_left = on_left
        self._monotonic = monotonic
        self._role = role
        self._on_dead = on_dead
        self._processes: dict[str, tuple[ProcessIdentity, ...]] = {}
        self._suspects: dict[str, _Suspect] = {}
        self._suspected = asyncio.Event()
        self._endpoints: dict[str, str] = {}

    def endpoint(self, incarnation: str) -> str | None:
        """Where a sender answers, or answered when it was a member; None once it is known to be dead."""
        return self._endpoints.get(incarnation)

    @property
    def suspects(self) -> int:
        """Former members that are not known to be dead."""
        return len(self._suspects)

    async def follow(self, registry: Registry) -> None:
        """Keep up with the registry, for ever. Roles that a process changes to are watched for its next life."""
        roles = CHANGEABLE_ROLES if self._role in CHANGEABLE_ROLES else (self._role,)
        async for event in registry.watch(frozenset(roles)):
            replica = event.replica
            own = replica.role is self._role
            if isinstance(event, Removed):
                if own:
                    self._suspect(replica)
                continue
            if not own and not self._suspects:
                continue  # agents are not read at every load that is published
            found = tuple(_processes(rank.agent for rank in replica.ranks))
            if own:
                self._endpoints[replica.incarnation] = replica.endpoint
                self._processes[replica.incarnation] = found
                self._suspects.pop(replica.incarnation, None)
            await self._follow_lives(replica.incarnation, found)

    async def _follow_lives(self, incarnation: str, processes: tuple[ProcessIdentity, ...]) -> None:
        """Former lives of these processes are over."""
        for former, suspect in tuple(self._suspects.items()):
            another = former != incarnation and bool(set(suspect.processes) & set(processes))
            if another and self._forget(former):
                _log.info("a sender began another life", former=short(former), incarnation=short(incarnation))
                await self._on_dead(former)

    def _forget(self, suspect: str) -> bool:
        """Whether it was a suspect still: both tasks wait while they tell of another one."""
        if self._suspects.pop(suspect, None) is None:
            return False
        self._endpoints.pop(suspect, None)
        return True

    def _suspect(self, replica: Replica) -> None:
        processes = self._processes.pop(replica.incarnation, ())
        if processes:
            self._suspects[replica.incarnation] = _Suspect(processes, self._monotonic())
            self._suspected.set()
            _log.info("a sender left the registry", replica=replica.id, incarnation=short(replica.incarnation))

    async def examine(self) -> None:
        """Ask the kernel about suspects until they are dead, for ever."""
        while True:
            await self._suspected.wait()
            for incarnation, suspect in tuple(self._suspects.items()):
                found = {process.liveness() for process in suspect.processes}
                if Liveness.UNKNOWN in found:
                    late = self._on_left is None or self._monotonic() - suspect.since >= LEFT_S
                    if late and self._forget(incarnation):
                        self._give_up(incarnation, suspect.processes)
                elif found == {Liveness.DEAD} and self._forget(incarnation):
                    _log.info("a sender is dead", incarnation=short(incarnation))
                    await self._on_dead(incarnation)
            if self._suspects:
                await asyncio.sleep(POLL_S)
            else:
                self._suspected.clear()

    def _give_up(self, incarnation: str, processes: tuple[ProcessIdentity, ...]) -> None:
        elsewhere = all(process.elsewhere for process in processes)
        ended = 0 if self._on_left is None else self._on_left(incarnation, elsewhere=elsewhere)
        _log.warning(
            "nothing is known of a sender's death: another host", incarnation=short(incarnation), streams_closed=ended
        )


def _processes(agents: Iterable[bytes]) -> Iterable[ProcessIdentity]:
    for serialised in agents:
        try:
            agent = common_pb2.TransferAgent.FromString(serialised)
            yield decode_envelope(agent.agent_metadata).process
        except (DecodeError, MalformedBytes) as error:
            # L13: without an identity there is never evidence of death; its rows wait for a notice.
            _log.warning("a member's transfer agent cannot be read", error=str(error))
