"""The transfer engine over NIXL: checks in the caller's thread, everything else on the transfer thread (loop.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from headrace.kvcache.handle import ChecksumKind, Handle
from headrace.kvcache.transfer.admission import LocalIdentity, plan_push
from headrace.kvcache.transfer.base import (
    NO_NETWORK,
    PeerDescription,
    TransferEngine,
    TransferSettings,
    TransferStats,
)
from headrace.kvcache.transfer.copies import Copy, Direction, Span
from headrace.kvcache.transfer.errors import EngineClosed, PeerRefused, Refusal, TransferError
from headrace.kvcache.transfer.handshake import Handshake
from headrace.kvcache.transfer.ledger import Ledger
from headrace.kvcache.transfer.loop import TransferThread, give_way
from headrace.kvcache.transfer.outbound import OutboundPush, Outgoing
from headrace.kvcache.transfer.peers import Liveness, Peer, PeerTable, ProcessIdentity, check_fingerprints
from headrace.kvcache.transfer.pushes import Outcome, Push, Ready, RowMove, TerminalNotice
from headrace.kvcache.transfer.regions import MemoryRegion
from headrace.kvcache.transfer.span_copy import SpanCopy, route_copy
from headrace.kvcache.transfer.wire import Envelope, MalformedBytes, decode_envelope
from headrace.kvcache.transfer.wire_job import PushState

_T = TypeVar("_T")


class NixlTransferEngine(TransferEngine):
    """See TransferEngine. ``clock`` and ``yield_cpu`` are injected by tests."""

    def __init__(
        self,
        *,
        incarnation: str,
        rank: int = 0,
        layout_fingerprint: bytes | None,
        model_fingerprint: bytes,
        settings: TransferSettings | None = None,
        checksums: tuple[ChecksumKind, ...] = (ChecksumKind.XXH3_64, ChecksumKind.LANES_64),
        clock: Callable[[], float] = time.monotonic,
        yield_cpu: Callable[[], None] = give_way,
    ) -> None:
        """Starts the thread and the agent. ``checksums``: what this process can verify. Raises NixlMissing."""
        self._own = LocalIdentity(incarnation, rank, layout_fingerprint, model_fingerprint)
        self._settings = settings or TransferSettings()
        self._clock = clock
        self._ledger = Ledger(self._settings.max_pushes)
        self._peers = PeerTable()
        self._thread = TransferThread(self._own, self._settings, checksums, self._ledger, self._peers, clock, yield_cpu)
        self._thread.start()
        self._thread.started.result()

    # --- memory ------------------------------------------------------------------------------------------------

    def register(self, region: MemoryRegion) -> None:
        """Raises ValueError: the name, or the (payload, role, version) of a landing region, is taken."""
        self._ask(lambda: self._thread.memory.register(region)).result()

    def deregister(self, name: str) -> None:
        """Raises ValueError: unknown, or pushes or copies that use it are not terminal."""
        self._ask(lambda: self._thread.deregister(name)).result()

    def describe(self) -> PeerDescription:
        return self._ask(self._thread.describe).result()

    # --- peers -------------------------------------------------------------------------------------------------

    def connect(self, peer: PeerDescription) -> Future[str]:
        try:
            handshake = Handshake(peer, self._reachable(peer), self._clock() + self._settings.push_timeout_s)
        except TransferError as error:
            refused: Future[str] = Future()
            refused.set_exception(error)
            return refused
        self._tell(lambda: self._thread.connect(handshake))
        return handshake.done

    def disconnect(self, incarnation: str) -> Future[None]:
        return self._ask(lambda: self._thread.disconnect(incarnation))

    def peer(self, incarnation: str, rank: int = 0) -> Peer | None:
        """The connected agent, or None."""
        return self._peers.find(incarnation, rank)

    def wire_to(self, incarnation: str, rank: int = 0) -> str | None:
        peer = self._peers.find(incarnation, rank)
        return None if peer is None or peer.lost else peer.wire("cpu", "cpu")

    # --- transfers ---------------------------------------------------------------------------------------------

    def push(
        self,
        handle: Handle,
        moves: Sequence[RowMove],
        *,
        timeout_s: float | None = None,
        last: bool = False,
        ready: Ready | None = None,
    ) -> Push:
        if self._ledger.is_closed:
            raise EngineClosed("the transfer engine is closed")
        timeout_s = self._settings.push_timeout_s if timeout_s is None else timeout_s
        found = self._peers.find(handle.incarnation, handle.rank)
        departed, regions = self._ledger.has_departed(handle.incarnation), self._thread.memory.regions
        push, peer, routes = plan_push(handle, moves, self._own, found, departed, regions, self._settings.gather)
        deadline = self._clock() + timeout_s

        def enqueue(record: Outgoing) -> None:
            outbound = OutboundPush(
                push, record, peer, routes, deadline=deadline, timeout_s=timeout_s, last=last, ready=ready
            )
            self._thread.inbox.put(lambda: self._thread.activate(outbound))

        self._ledger.admit(push, moves, last=last, enqueue=enqueue)
        return push

    def end(self, handle: Handle, outcome: Outcome = Outcome.FAILED) -> Future[None]:
        def enqueue(record: Outgoing) -> None:
            self._thread.inbox.put(lambda: self._thread.last_word(record))

        return self._ledger.ending(handle, outcome, enqueue)

    def cut(self, handle: Handle) -> None:
        try:
            self._tell(lambda: self._thread.cut(handle))
        except EngineClosed:
            return  # which cuts everything

    def copy(
        self,
        direction: Direction,
        incarnation: str,
        spans: Sequence[Span],
        *,
        region: str,
        rank: int = 0,
        timeout_s: float | None = None,
    ) -> Copy:
        if self._ledger.is_closed:
            raise EngineClosed("the transfer engine is closed")
        timeout_s = self._settings.push_timeout_s if timeout_s is None else timeout_s
        peer, departed = self._peers.find(incarnation, rank), self._ledger.has_departed(incarnation)
        route = route_copy(direction, spans, region, incarnation, peer, departed, self._thread.memory.regions)
        copy = Copy(direction, incarnation, tuple(spans))
        work = SpanCopy(copy, route, deadline=self._clock() + timeout_s, timeout_s=timeout_s)
        self._ledger.admit_copy(copy, lambda: self._thread.inbox.put(lambda: self._thread.activate_copy(work)))
        return copy

    # --- notices -----------------------------------------------------------------------------------------------

    def expect(self, transfer_id: str) -> None:
        self._ledger.expect(transfer_id)
        self._tell(lambda: None)

    def forget(self, transfer_id: str) -> None:
        self._ledger.forget(transfer_id)

    def poll(self) -> None:
        self._tell(lambda: None)

    def take_notices(self) -> list[TerminalNotice]:
        return self._ledger.take_notices()

    def on_notice(self, wake: Callable[[], None]) -> None:
        self._thread.wake = wake

    # --- whole -------------------------------------------------------------------------------------------------

    def stats(self) -> TransferStats:
        states = self._ledger.states()
        totals = self._ledger.totals
        return TransferStats(
            pushes_posting=states.count(PushState.POSTING),
            pushes_in_flight=states.count(PushState.IN_FLIGHT),
            pushes_abandoned=states.count(PushState.ABANDONED),
            pushes_done=totals.done,
            pushes_failed=totals.failed,
            transfers_open=self._ledger.open_transfers,
            bytes_sent=totals.bytes_sent,
            notices_sent=totals.notices_sent,
            notices_received=totals.notices_received,
            notices_undelivered=totals.notices_undelivered,
            peers=len(self._peers),
            copies_open=self._ledger.open_copies,
            copies_done=totals.copies_done,
            copies_failed=totals.copies_failed,
            bytes_copied=totals.bytes_copied,
            transports={peer.description.agent_name: peer.transport for peer in self._peers},
        )

    def close(self, timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        self._ledger.close(lambda: self._thread.inbox.put(lambda: self._thread.begin_close(deadline)))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- inside ------------------------------------------------------------------------------------------------

    def _reachable(self, peer: PeerDescription) -> Envelope:
        """As ``examine``; and UCX may reach it. Raises PeerRefused, EngineClosed."""
        envelope = self.examine(peer)
        if self._settings.net_devices == NO_NETWORK and envelope.process.boot_id != ProcessIdentity.own().boot_id:
            raise PeerRefused(
                Refusal.TRANSPORT,
                "it is on another host, and UCX may use no network here; with TLS on, let rows go by stream "
                "(transfer.transport) or name a network that you trust (transfer.trusted_network)",
            )
        return envelope

    def examine(self, peer: PeerDescription) -> Envelope:
        """Can rows pass between it and this process at all, by whatever wire? Raises PeerRefused, EngineClosed."""
        own = self._own
        if self._ledger.is_closed:
            raise EngineClosed("the transfer engine is closed")
        check_fingerprints(peer, layout_fingerprint=own.layout_fingerprint, model_fingerprint=own.model_fingerprint)
        try:
            envelope = decode_envelope(peer.agent_metadata)
        except MalformedBytes as error:
            raise PeerRefused(Refusal.METADATA, f"{error}; both sides must run one version") from error
        if len(envelope.versions) != len(peer.regions):
            raise PeerRefused(Refusal.METADATA, "its landing regions and their versions differ in number")
        if self._ledger.has_departed(peer.incarnation) or envelope.process.liveness() is Liveness.DEAD:
            raise PeerRefused(
                Refusal.INCARNATION, f"{peer.incarnation} is gone; a restarted peer has a new incarnation"
            )
        return envelope

    def _tell(self, command: Callable[[], None]) -> None:
        self._ledger.submit(lambda: self._thread.inbox.put(command))

    def _ask(self, question: Callable[[], _T]) -> Future[_T]:
        answer: Future[_T] = Future()
        answer.set_running_or_notify_cancel()

        def command() -> None:
            try:
                answer.set_result(question())
            except Exception as error:  # noqa: BLE001  the caller raises it
                answer.set_exception(error)

        self._tell(command)
        return answer
