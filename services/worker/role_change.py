"""A worker becomes another one without loading its model again.

1. It refuses new work, finishes what runs, and after its time hands the rest over (L19).
2. It waits until no peer may still write its memory. The process goes on, and memory that is given back is soon
   something else: a write that a frozen peer posted would land in it (L7). While one may, the change is given up.
3. This life ends: registry entry, ports, transfer agent, engine and pools go.
4. The next begins as a process does: settings of its role, pools, canary, registry, under a new incarnation (L14, L18).
   When it does not come up, the old role comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from headrace.services.runtime import logs
from headrace.services.runtime.errors import FailedPrecondition, InvalidArgument
from headrace.services.runtime.lifecycle import Start
from headrace.services.runtime.peers import PeerRole, peer_of_certificate
from headrace.services.runtime.process import ServiceProcess
from headrace.services.runtime.registry.base import CHANGEABLE_ROLES, Role
from headrace.services.worker.lives import WorkerLives, start_of
from headrace.services.worker.settings import WorkerSettings

POLL_S: Final = 0.02
CHANGING: Final = "the role changes"
_log = logs.get(__name__)
Writable = Callable[[], Awaitable[int]]
"""How many rows or the like a peer may still write."""


class RoleChange:
    """Of one life. Belongs to the event loop's thread."""

    def __init__(self, settings: WorkerSettings, lives: WorkerLives, process: ServiceProcess) -> None:
        self._settings = settings
        self._lives = lives
        self._process = process
        self.writable: Sequence[Writable] = ()
        """Memory that peers write; all must be 0 before it is given back."""

    async def __call__(self, role: Role, wait_s: float) -> None:
        """Begin; Status tells how it goes on. Raises InvalidArgument, FailedPrecondition."""
        own = self._settings.ROLE
        if role not in CHANGEABLE_ROLES:
            raise InvalidArgument(f"a {own} becomes a {' or '.join(CHANGEABLE_ROLES)}, not a {role}", field="role")
        intake = self._process.intake
        if self._lives.changing:
            raise FailedPrecondition("a change of role is under way; ask Status how far it is")
        if intake.membership is None:
            raise FailedPrecondition("this process has not joined the cluster yet")
        self._check_certificate()
        settings = await asyncio.to_thread(self._lives.settings_of, role, self._settings)
        if self._lives.changing or intake.ending:
            raise FailedPrecondition("a change of role is under way, or the process ends")
        self._lives.begin(own, role)
        intake.ending = CHANGING
        _log.info("the role changes", old=own.value, new=role.value, wait_seconds=wait_s)
        self._process.life.spawn(self._change(settings, wait_s), "role-change")

    def _check_certificate(self) -> None:
        """Peers let a certificate do what its role does, and the process keeps its own."""
        cert = None if self._process.tls is None else self._process.tls.current().cert
        if cert is not None and (role := peer_of_certificate(cert).role) is not PeerRole.WHOLE:
            raise FailedPrecondition(
                f"this worker's certificate is of role {role.value}; one that changes its role needs one of role whole "
                "(`headrace certs issue FOLDER whole --replica NAME`)"
            )

    async def _change(self, settings: WorkerSettings, wait_s: float) -> None:
        intake = self._process.intake
        try:
            if await intake.drain(wait_s, hand_over=True):
                raise FailedPrecondition(f"{intake.live} requests do not end")
            await self._until_quiet()
        except FailedPrecondition as error:
            self._lives.failed(error)
            if intake.ending == CHANGING:  # else the process ends, and drains
                intake.ending = ""
                with suppress(FailedPrecondition):  # it ends since the canary began
                    await intake.resume()
            return
        self._lives.starting()
        self._process.life.become(start_of(settings, self._lives), self._back, f"becomes a {settings.ROLE}")

    def _back(self, error: BaseException) -> Start:
        """The new role did not come up."""
        self._lives.failed(error)
        return start_of(self._settings, self._lives)

    async def _until_quiet(self) -> None:
        """Peers' last words may take as long as closing may, after everything has ended."""
        left = 0
        try:
            async with asyncio.timeout(self._settings.stop.close_seconds):
                while left := sum([await count() for count in self.writable]):  # noqa: ASYNC110 - sizes have no event
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise FailedPrecondition(
                f"{left} rows may still be written by a peer that has not said that its wire is quiet; end that peer "
                "(`headrace status` shows who does not answer), then change the role"
            ) from None
