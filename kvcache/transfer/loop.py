"""The transfer thread: the only one that touches the NIXL agent. Commands come in through an inbox.

It posts and polls without the GIL held and gives way between polls; with nothing on the wire it sleeps on the inbox and
wakes to ask for notices.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from headrace.kvcache.handle import ChecksumKind, Handle
from headrace.kvcache.transfer.admission import LocalIdentity
from headrace.kvcache.transfer.agent import WireAgent
from headrace.kvcache.transfer.base import PeerDescription, TransferSettings
from headrace.kvcache.transfer.errors import EngineClosed, PeerLost, PushCut, TransferError
from headrace.kvcache.transfer.handshake import Handshake
from headrace.kvcache.transfer.ledger import Ledger, transfer_key
from headrace.kvcache.transfer.memory import RegisteredMemory
from headrace.kvcache.transfer.outbound import OutboundPush, Outgoing
from headrace.kvcache.transfer.peers import PeerTable
from headrace.kvcache.transfer.span_copy import SpanCopy
from headrace.kvcache.transfer.staging import Staging
from headrace.kvcache.transfer.wire import MalformedBytes, decode_notice, encode_notice

_LOG = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None)

SPINS = 64
"""Polls without progress before the thread sleeps between polls (a stopped receiver over TCP)."""
POLL_SLEEP_S = 0.0002


def give_way() -> None:
    """sched_yield without the GIL; os.sched_yield keeps it, and the engine thread would wait 5 ms for its turn."""
    _LIBC.sched_yield()


class TransferThread(threading.Thread):
    """Owns the agent from start to close."""

    def __init__(
        self,
        own: LocalIdentity,
        settings: TransferSettings,
        checksums: tuple[ChecksumKind, ...],
        ledger: Ledger,
        peers: PeerTable,
        clock: Callable[[], float],
        yield_cpu: Callable[[], None],
    ) -> None:
        super().__init__(name="headrace-transfer", daemon=True)
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.started: Future[None] = Future()
        self.wake: Callable[[], None] | None = None
        self._own = own
        self._settings = settings
        self._checksums = checksums
        self._ledger = ledger
        self._peers = peers
        self._clock = clock
        self._yield_cpu = yield_cpu
        self._active: list[OutboundPush] = []
        self._copies: list[SpanCopy] = []
        self._handshakes: list[Handshake] = []
        self._close_by: float | None = None

    # --- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            # The rank stands first: UCX keeps 31 characters of the name.
            self._agent = WireAgent(f"{self._own.rank}.{self._own.incarnation}", self._settings)
            self._staging = Staging(self._settings.window, self._settings.staging_bytes, self._agent.register)
            self.memory = RegisteredMemory(self._agent)
        except BaseException as error:
            self.started.set_exception(error)
            raise
        self.started.set_result(None)
        try:
            self._loop()
        except BaseException as error:
            # L6: a defect here must not leave anybody waiting.
            _LOG.critical("the transfer thread died; this process can send nothing more", exc_info=True)
            self._ledger.close()
            while not self.inbox.empty():
                self.inbox.get()()
            for work in self._work:
                work.report_closed()
            for handshake in self._handshakes:
                handshake.done.set_exception(EngineClosed(f"the transfer thread died: {error}"))
            raise
        self._tear_down()

    def _loop(self) -> None:
        fruitless = 0
        while not self._is_finished():
            moved = self._take_commands(block=not self._is_busy)
            for outbound in tuple(self._active):
                moved |= self._step(outbound)
            for copy in tuple(self._copies):
                moved |= self._step_copy(copy)
            for handshake in tuple(self._handshakes):
                moved |= self._shake(handshake)
            moved |= self._take_notices()
            fruitless = 0 if moved else fruitless + 1
            if self._is_busy:
                self._yield_cpu()
                if fruitless > SPINS:
                    time.sleep(POLL_SLEEP_S)

    def _take_commands(self, *, block: bool) -> bool:
        if self._close_by is not None:
            block = False
        interval = self._settings.notice_poll_s if self._ledger.expects_any else self._settings.idle_poll_s
        moved = False
        while True:
            try:
                command = self.inbox.get(block=block, timeout=interval)
            except queue.Empty:
                return moved
            command()
            moved, block = True, False

    def _step(self, outbound: OutboundPush) -> bool:
        moved = outbound.step(self._agent, self._staging, self._settings.window, self._clock())
        if outbound.push.state.is_terminal:
            self._active.remove(outbound)
            self._finish(outbound)
        return moved

    def _finish(self, outbound: OutboundPush) -> None:
        if outbound.lost:
            description = outbound.peer.description
            self._peers.mark_lost(description.incarnation, description.rank)
        owes = self._ledger.settled(outbound.push, outbound.record)
        if owes:
            self.last_word(outbound.record)
        outbound.report(self._clock())

    def _step_copy(self, work: SpanCopy) -> bool:
        moved = work.step(self._agent, self._settings.window, self._clock())
        if work.copy.state.is_terminal:
            self._copies.remove(work)
            if work.lost:
                description = work.route.peer.description
                self._peers.mark_lost(description.incarnation, description.rank)
            self._ledger.settled_copy(work.copy)
            work.report(self._clock())
        return moved

    @property
    def _work(self) -> tuple[OutboundPush | SpanCopy, ...]:
        """Whatever may be on the wire, handshakes aside."""
        return *self._active, *self._copies

    @property
    def _is_busy(self) -> bool:
        return bool(self._active or self._copies or self._handshakes)

    def _take_notices(self) -> bool:
        found = self._agent.notices()
        for sender, message in found:
            try:
                self._ledger.received(decode_notice(message, sender))
            except MalformedBytes as error:
                # L13: one bad message harms nobody; its rows stay quarantined until the sender is known dead.
                _LOG.warning("notice from %s dropped: %s", sender, error)
        if found and self.wake is not None:
            self.wake()
        return bool(found)

    # --- commands: run on this thread ----------------------------------------------------------------------------

    def activate(self, outbound: OutboundPush) -> None:
        outbound.plan(self._staging, self._settings.batch_bytes)
        if self._close_by is not None:
            outbound.cut(EngineClosed("the transfer engine is closing"))
        self._active.append(outbound)

    def activate_copy(self, work: SpanCopy) -> None:
        work.plan(self._settings.batch_bytes)
        if self._close_by is not None:
            work.cut(EngineClosed("the transfer engine is closing"))
        self._copies.append(work)

    def last_word(self, record: Outgoing) -> None:
        """Send the terminal notice unless it rode behind the last write or pushes are still on the wire."""
        if not self._ledger.owes_notice(record):
            return
        error: TransferError | None = None
        if not record.notified:
            peer = self._peers.find(record.handle.incarnation, record.handle.rank)
            if peer is None or peer.lost:
                error = PeerLost(record.handle.incarnation, "the terminal notice could not be sent")
            else:
                try:
                    self._agent.notify(peer.description.agent_name, encode_notice(record.notice()))
                except TransferError as failed:
                    error = failed
        self._ledger.ended(record, error)

    def cut(self, handle: Handle) -> None:
        for outbound in self._active:
            if transfer_key(outbound.push.handle) == transfer_key(handle):
                outbound.give_up(PushCut(handle.transfer_id))

    def deregister(self, name: str) -> None:
        """Raises ValueError: unknown, or being sent from (L7)."""
        region = self.memory.regions.get(name)
        if any(route.source is region for outbound in self._active for route in outbound.routes):
            raise ValueError(f"region {name!r} is being sent from; wait until its pushes are terminal (L7)")
        if any(work.route.local is region for work in self._copies):
            raise ValueError(f"region {name!r} is being copied; wait until its copies are terminal (L7)")
        self.memory.deregister(name)

    def describe(self) -> PeerDescription:
        return self.memory.describe(self._own, self._checksums)

    def connect(self, handshake: Handshake) -> None:
        description = handshake.description
        known = self._peers.find(description.incarnation, description.rank)
        if known is not None and not known.lost and known.description == description:
            handshake.done.set_result(known.transport)
            return
        for pending in self._handshakes:
            if pending.description == description:
                pending.done.add_done_callback(lambda done: _follow(done, handshake.done))
                return
        if known is not None and known.lost:
            # L14: a returned peer is probed and readmitted.
            self._agent.unload(description.agent_name)
        self._handshakes.append(handshake)
        try:
            handshake.start(self._agent, self.memory.probes)
        except TransferError as error:
            self._fail(handshake, error)

    def disconnect(self, incarnation: str) -> None:
        self._ledger.depart(incarnation)
        for handshake in tuple(self._handshakes):
            if handshake.description.incarnation == incarnation:
                self._fail(handshake, PeerLost(incarnation, "disconnected"))
        for peer in self._peers.remove(incarnation):
            self._agent.unload(peer.description.agent_name)
        for outbound in self._active:
            if outbound.peer.description.incarnation == incarnation:
                outbound.cut(PeerLost(incarnation, "disconnected"))
        for work in self._copies:
            if work.copy.peer == incarnation:
                work.cut(PeerLost(incarnation, "disconnected"))
        for record in self._ledger.transfers_to(incarnation):
            self.last_word(record)

    def begin_close(self, deadline: float) -> None:
        """deadline: of time.monotonic, whatever clock the pushes have."""
        self._close_by = deadline
        for work in self._work:
            work.cut(EngineClosed("the transfer engine is closing"))
        for handshake in tuple(self._handshakes):
            self._fail(handshake, EngineClosed("the transfer engine is closing"))

    # --- inside ------------------------------------------------------------------------------------------------

    def _shake(self, handshake: Handshake) -> bool:
        try:
            if not handshake.step(self._agent, self._settings, self._clock()):
                return False
        except TransferError as error:
            self._fail(handshake, error)
            return True
        self._handshakes.remove(handshake)
        assert handshake.peer is not None
        self._peers.put(handshake.peer)
        _LOG.info("transfer peer %s connected over %s", handshake.peer.description.agent_name, handshake.peer.transport)
        handshake.done.set_result(handshake.peer.transport)
        return True

    def _fail(self, handshake: Handshake, error: TransferError) -> None:
        self._handshakes.remove(handshake)
        handshake.abandon(self._agent)
        self._peers.mark_lost(handshake.description.incarnation, handshake.description.rank)
        handshake.done.set_exception(error)

    def _is_finished(self) -> bool:
        if self._close_by is None:
            return False
        on_wire = len(self._work)
        if on_wire and time.monotonic() >= self._close_by:
            _LOG.error("closing with %d pushes and copies still on the wire: their peers do not answer", on_wire)
            return True
        return not on_wire and self.inbox.empty()

    def _tear_down(self) -> None:
        for work in self._work:
            work.report_closed()
        for peer in tuple(self._peers):
            for gone in self._peers.remove(peer.description.incarnation):
                self._agent.unload(gone.description.agent_name)
        if not self._work:
            self.memory.release()
        del self._staging, self._agent


def _follow(leader: Future[str], follower: Future[str]) -> None:
    error = leader.exception()
    if error is not None:
        follower.set_exception(error)
    else:
        follower.set_result(leader.result())
