"""The transfer engine of a service: for each peer the fastest wire that is allowed, behind one interface.

| peer | rows go |
|---|---|
| of this host | over shared memory (NIXL) |
| elsewhere, over a network that UCX may use | as UCX chooses (NIXL) |
| elsewhere, and UCX may use no network | by stream to the peer's own port, under its certificates |

`Mode.NIXL` refuses the last kind, `Mode.STREAM` sends everything by stream (for trying it on one host). Copies out of
host tiers (copies.py) are NIXL's alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import StrEnum

from headrace.kvcache.handle import Handle
from headrace.kvcache.transfer.admission import LocalIdentity
from headrace.kvcache.transfer.base import (
    NO_NETWORK,
    PeerDescription,
    TransferEngine,
    TransferSettings,
    TransferStats,
)
from headrace.kvcache.transfer.copies import Copy, Direction, Span
from headrace.kvcache.transfer.errors import PeerRefused, Refusal, TransferError
from headrace.kvcache.transfer.inbound import InboundStreams
from headrace.kvcache.transfer.nixl import NixlTransferEngine
from headrace.kvcache.transfer.pushes import Outcome, Push, Ready, RowMove, TerminalNotice
from headrace.kvcache.transfer.regions import MemoryRegion
from headrace.kvcache.transfer.row_wire import RowWire
from headrace.kvcache.transfer.streams import StreamSender
from headrace.kvcache.transfer.wire import MalformedBytes, process_of
from headrace.kvcache.transfer.wire_job import PushState


class Mode(StrEnum):
    """Which wires a process may send over."""

    AUTO = "auto"
    NIXL = "nixl"
    STREAM = "stream"


class RoutedTransferEngine(TransferEngine):
    """NIXL and byte streams. Made on the event loop that the streams run on."""

    def __init__(
        self,
        own: LocalIdentity,
        settings: TransferSettings,
        wire: RowWire,
        mode: Mode = Mode.AUTO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises NixlMissing."""
        self._mode = mode
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._nixl = NixlTransferEngine(
            incarnation=own.incarnation,
            rank=own.rank,
            layout_fingerprint=own.layout_fingerprint,
            model_fingerprint=own.model_fingerprint,
            settings=settings,
            clock=clock,
        )
        self._listener = ""
        self._regions: Mapping[str, MemoryRegion] = {}
        """Replaced, never changed, so that it is read without a lock."""
        self.inbound = InboundStreams(lambda: self._regions)
        """The receiving side, for the service that takes streams."""
        self._streams = StreamSender(own, settings, wire, lambda: self._regions, self._loop, clock)

    def listen(self, address: str) -> None:
        """Streams are taken at host:port from now on, and peers are told so."""
        if self._mode is not Mode.NIXL:
            self._listener = address

    # --- memory ------------------------------------------------------------------------------------------------

    def register(self, region: MemoryRegion) -> None:
        self._nixl.register(region)
        self._regions = {**self._regions, region.name: region}

    def deregister(self, name: str) -> None:
        region = self._regions.get(name)
        if region is not None and self._streams.uses(region):
            raise ValueError(f"region {name!r} is being sent from; wait until its pushes are terminal (L7)")
        self._nixl.deregister(name)
        self._regions = {key: value for key, value in self._regions.items() if key != name}

    def describe(self) -> PeerDescription:
        return replace(self._nixl.describe(), listener=self._listener)

    # --- peers -------------------------------------------------------------------------------------------------

    def connect(self, peer: PeerDescription) -> Future[str]:
        if not self._by_stream(peer):
            return self._nixl.connect(peer)
        try:
            envelope = self._nixl.examine(peer)
            if not peer.listener:
                raise PeerRefused(
                    Refusal.TRANSPORT,
                    "its memory cannot be written from here and it takes no streams; leave its transfer.transport at "
                    "auto, or name a network that you trust (transfer.trusted_network)",
                )
        except TransferError as error:
            refused: Future[str] = Future()
            refused.set_exception(error)
            return refused
        if self._mode is Mode.STREAM and not self._is_elsewhere(peer):
            # Host tiers are read all the same; whether they can be is told when one is.
            self._nixl.connect(peer)
        return asyncio.run_coroutine_threadsafe(self._streams.connect(peer, envelope), self._loop)

    def _by_stream(self, peer: PeerDescription) -> bool:
        if self._mode is Mode.AUTO:
            return self._settings.net_devices == NO_NETWORK and self._is_elsewhere(peer)
        return self._mode is Mode.STREAM

    def _is_elsewhere(self, peer: PeerDescription) -> bool:
        try:
            return process_of(peer).elsewhere
        except MalformedBytes:
            return False  # NIXL's engine refuses it

    def wire_to(self, incarnation: str, rank: int = 0) -> str | None:
        return self._nixl.wire_to(incarnation, rank)

    def disconnect(self, incarnation: str) -> Future[None]:
        self.sender_died(incarnation)
        self._loop.call_soon_threadsafe(self._streams.disconnect, incarnation)
        return self._nixl.disconnect(incarnation)

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
        if self._streams.peers.find(handle.incarnation, handle.rank) is None:
            return self._nixl.push(handle, moves, timeout_s=timeout_s, last=last, ready=ready)
        timeout_s = self._settings.push_timeout_s if timeout_s is None else timeout_s
        return self._streams.push(handle, moves, timeout_s=timeout_s, last=last, ready=ready)

    def end(self, handle: Handle, outcome: Outcome = Outcome.FAILED) -> Future[None]:
        if self._streams.peers.find(handle.incarnation, handle.rank) is None:
            return self._nixl.end(handle, outcome)
        return self._streams.end(handle, outcome)

    def cut(self, handle: Handle) -> None:
        self._streams.cut(handle)
        self._nixl.cut(handle)

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
        return self._nixl.copy(direction, incarnation, spans, region=region, rank=rank, timeout_s=timeout_s)

    # --- receiving ---------------------------------------------------------------------------------------------

    def grant(self, handle: Handle, sender: str | None) -> None:
        self.inbound.grant(handle, sender)
        self._nixl.grant(handle, sender)

    def sender_died(self, incarnation: str) -> None:
        for transfer_id in self.inbound.sender_died(incarnation):
            self._nixl.forget(transfer_id)

    def sender_left(self, incarnation: str, *, elsewhere: bool) -> int:
        """A member that cannot be looked at has left: its transfers end, if it can write by nothing but streams.
        `elsewhere`: it shares no memory with this process. Returns how many ended."""
        streams_only = elsewhere and self._settings.net_devices == NO_NETWORK
        return self.inbound.sender_left(incarnation, streams_only=streams_only)

    def expect(self, transfer_id: str) -> None:
        self._nixl.expect(transfer_id)

    def forget(self, transfer_id: str) -> None:
        self.inbound.close(transfer_id)
        self._nixl.forget(transfer_id)

    def poll(self) -> None:
        self._nixl.poll()

    def take_notices(self) -> list[TerminalNotice]:
        written, streamed = self._nixl.take_notices(), self.inbound.take_notices()
        # Whatever it came over, the transfer is over: no stream may be written under it, and nothing is expected.
        for notice in written:
            self.inbound.close(notice.transfer_id)
        for notice in streamed:
            self._nixl.forget(notice.transfer_id)
        return [*written, *streamed]

    def on_notice(self, wake: Callable[[], None]) -> None:
        self._nixl.on_notice(wake)
        self.inbound.wake = wake

    # --- whole -------------------------------------------------------------------------------------------------

    def stats(self) -> TransferStats:
        nixl, ledger = self._nixl.stats(), self._streams.ledger
        states, totals = ledger.states(), ledger.totals
        return replace(
            nixl,
            pushes_posting=nixl.pushes_posting + states.count(PushState.POSTING),
            pushes_done=nixl.pushes_done + totals.done,
            pushes_failed=nixl.pushes_failed + totals.failed,
            transfers_open=nixl.transfers_open + ledger.open_transfers,
            bytes_sent=nixl.bytes_sent + totals.bytes_sent,
            notices_sent=nixl.notices_sent + totals.notices_sent,
            notices_received=nixl.notices_received + self.inbound.notices,
            notices_undelivered=nixl.notices_undelivered + totals.notices_undelivered,
            peers=nixl.peers + len(self._streams.peers),
            transports={
                **nixl.transports,
                **{peer.description.agent_name: peer.transport for peer in self._streams.peers},
            },
        )

    def close(self, timeout_s: float = 5.0) -> None:
        """Not on the event loop's thread, which has to go on meanwhile."""
        if threading.get_ident() == self._thread:
            raise RuntimeError("close the transfer engine on a thread: asyncio.to_thread(transfer.close)")
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._streams.close(), self._loop).result(timeout_s)
        self._nixl.close(timeout_s)
