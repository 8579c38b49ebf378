"""The sending side of byte streams: pushes as messages to the receiver's own port, for peers whose memory cannot be
written (another host, TLS on, no network that is trusted).

Each push is one stream, and pushes of one transfer follow one another; at most TURNS streams to one peer are written at
a time, the others wait, so a receiver that takes nothing holds up nobody else's. What is sent was copied out of the
source rows before, so a push that is cut, late or broken off is terminal at once. The state belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from headrace.kvcache.checksum import checksums
from headrace.kvcache.handle import ChecksumKind, Handle
from headrace.kvcache.transfer.admission import LocalIdentity, plan_push
from headrace.kvcache.transfer.base import PeerDescription, TransferSettings
from headrace.kvcache.transfer.errors import (
    EngineClosed,
    PeerLost,
    PushCut,
    PushDeadline,
    TransferError,
    WireFailed,
)
from headrace.kvcache.transfer.inbound import STREAM, side_stream
from headrace.kvcache.transfer.ledger import Ledger, transfer_key
from headrace.kvcache.transfer.outbound import MoveRoute, Outgoing, TransferKey
from headrace.kvcache.transfer.peers import Peer, PeerTable
from headrace.kvcache.transfer.pushes import Outcome, Push, PushResult, Ready, RowMove
from headrace.kvcache.transfer.regions import MemoryRegion
from headrace.kvcache.transfer.row_wire import RowPiece, RowWire
from headrace.kvcache.transfer.wire import Envelope
from headrace.kvcache.transfer.wire_job import PushState

_LOG = logging.getLogger(__name__)
TURNS = 2
READY_POLL_S = 0.001
NOTICE_TIMEOUT_S = 5.0


@dataclass(eq=False)
class _Job:
    """One push on its way."""

    push: Push
    record: Outgoing
    peer: Peer
    routes: tuple[MoveRoute, ...]
    deadline: float
    timeout_s: float
    last: bool
    ready: Ready | None
    task: asyncio.Task[PushResult] | None = None
    cause: TransferError | None = None
    """Why it was cut."""
    sums: list[list[int]] = field(default_factory=list)


class StreamSender:
    """Pushes of one process. ``push``, ``end``, ``cut`` may be called from any thread."""

    def __init__(
        self,
        own: LocalIdentity,
        settings: TransferSettings,
        wire: RowWire,
        regions: Callable[[], Mapping[str, MemoryRegion]],
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self._own = own
        self._settings = settings
        self._wire = wire
        self._regions = regions
        self._loop = loop
        self._clock = clock
        self.ledger = Ledger(settings.max_pushes)
        self.peers = PeerTable()
        self._turns: dict[str, asyncio.Semaphore] = {}
        """By incarnation."""
        self._lines: dict[TransferKey, asyncio.Task[PushResult]] = {}
        """The last push of each transfer."""
        self._jobs: dict[_Job, None] = {}
        self._saying: dict[Outgoing, asyncio.Task[None]] = {}
        """Terminal notices on their way."""

    # --- peers -------------------------------------------------------------------------------------------------

    async def connect(self, description: PeerDescription, envelope: Envelope) -> str:
        """Reach the peer's listener. Raises PeerLost."""
        known = self.peers.find(description.incarnation, description.rank)
        if known is None or known.lost or known.description.listener != description.listener:
            await self._wire.greet(description, self._settings.push_timeout_s)
            _LOG.info("transfer peer %s takes rows by stream at %s", description.agent_name, description.listener)
        kinds = {region.memory for region in self._regions().values()} | {"cpu"}
        pairs = {(here, region.memory): STREAM for here in kinds for region in description.regions}
        self.peers.put(Peer(description, envelope.process, envelope.versions, pairs or {("cpu", "cpu"): STREAM}))
        return STREAM

    def disconnect(self, incarnation: str) -> None:
        """See TransferEngine.disconnect; on the loop."""
        self.ledger.depart(incarnation)
        lost = PeerLost(incarnation, "disconnected")
        self.peers.remove(incarnation)
        self._turns.pop(incarnation, None)
        for job in tuple(self._jobs):
            if job.peer.description.incarnation == incarnation:
                self._cut(job, lost)
        for record in self.ledger.transfers_to(incarnation):
            self._last_word(record)

    # --- transfers ---------------------------------------------------------------------------------------------

    def push(
        self, handle: Handle, moves: Sequence[RowMove], *, timeout_s: float, last: bool, ready: Ready | None
    ) -> Push:
        """See TransferEngine.push."""
        found = self.peers.find(handle.incarnation, handle.rank)
        departed = self.ledger.has_departed(handle.incarnation)
        push, peer, routes = plan_push(handle, moves, self._own, found, departed, self._regions(), gather=False)
        deadline = self._clock() + timeout_s

        def enqueue(record: Outgoing) -> None:
            job = _Job(push, record, peer, routes, deadline, timeout_s, last, ready)
            self._loop.call_soon_threadsafe(self._start, job)

        self.ledger.admit(push, moves, last=last, enqueue=enqueue)
        return push

    def end(self, handle: Handle, outcome: Outcome) -> Future[None]:
        """See TransferEngine.end."""

        def enqueue(record: Outgoing) -> None:
            self._loop.call_soon_threadsafe(self._last_word, record)

        return self.ledger.ending(handle, outcome, enqueue)

    def cut(self, handle: Handle) -> None:
        """See TransferEngine.cut."""

        def on_loop() -> None:
            for job in tuple(self._jobs):
                if transfer_key(job.push.handle) == transfer_key(handle):
                    self._cut(job, PushCut(handle.transfer_id))

        self._loop.call_soon_threadsafe(on_loop)

    def uses(self, region: MemoryRegion) -> bool:
        """Some push reads it."""
        return any(route.source is region for job in tuple(self._jobs) for route in job.routes)

    async def close(self) -> None:
        """Cut what is open. Nothing is sent afterwards."""
        self.ledger.close()
        closing = EngineClosed("the transfer engine is closing")
        await asyncio.sleep(0)  # what was admitted has a task after this
        for job in tuple(self._jobs):
            self._cut(job, closing)
        tasks = [job.task for job in self._jobs if job.task is not None]
        await asyncio.gather(*tasks, *self._saying.values(), return_exceptions=True)

    # --- on the loop -------------------------------------------------------------------------------------------

    def _start(self, job: _Job) -> None:
        key = job.record.key
        job.task = task = self._loop.create_task(self._run(job, self._lines.get(key)))
        self._jobs[job] = None
        self._lines[key] = task
        task.add_done_callback(partial(self._done, job))

    async def _run(self, job: _Job, before: asyncio.Task[PushResult] | None) -> PushResult:
        """Raises TransferError."""
        handle, description = job.push.handle, job.peer.description
        try:
            async with asyncio.timeout(max(0.0, job.deadline - self._clock())):
                if before is not None:
                    await asyncio.wait({before})
                while job.ready is not None and not job.ready.query():  # noqa: ASYNC110 - a device's event
                    await asyncio.sleep(READY_POLL_S)
                async with self._turns.setdefault(description.incarnation, asyncio.Semaphore(TURNS)):
                    began = self._clock()
                    left = max(0.001, job.deadline - began)
                    count = 0
                    async with self._wire.open(description, handle, left) as stream:
                        for pieces in self._pieces(job):
                            await stream.write(pieces)
                            count += len(pieces)
                        if job.last:
                            nbytes = job.record.landed_bytes + job.push.nbytes
                            await stream.end(complete=not job.record.failed, nbytes=nbytes)
                        await stream.close()
        except TimeoutError:
            raise PushDeadline(handle.transfer_id, job.timeout_s) from None
        job.record.notified = job.last
        return PushResult(
            transfer_id=handle.transfer_id,
            checksums=tuple(tuple(sums) for sums in job.sums),
            nbytes=job.push.nbytes,
            descriptors=count,
            transport=STREAM,
            seconds=self._clock() - began,
        )

    def _pieces(self, job: _Job) -> Iterator[list[RowPiece]]:
        """The rows, a message at a time, summed as they are read."""
        kind, most = job.push.handle.checksum_kind, self._wire.message_bytes
        for route in job.routes:
            sums: list[int] = []
            job.sums.append(sums)
            move, size = route.move, route.source.item_bytes
            step = max(1, most // size)
            for first in range(0, len(move.source_items), step):
                sources = move.source_items[first : first + step]
                rows = _read(route.source, sources, kind, sums)
                targets = move.target_items[first : first + step]
                if size <= most:
                    yield [RowPiece(move.target, item, 0, data) for item, data in zip(targets, rows, strict=True)]
                    continue
                for item, data in zip(targets, rows, strict=True):
                    for offset in range(0, size, most):
                        yield [RowPiece(move.target, item, offset, data[offset : offset + most])]

    def _cut(self, job: _Job, error: TransferError) -> None:
        if job.task is not None and not job.task.done():
            job.cause = job.cause or error
            job.task.cancel()

    def _done(self, job: _Job, task: asyncio.Task[PushResult]) -> None:
        """The wire is quiet: the stream is over, and its messages were copies."""
        push, record = job.push, job.record
        cause = job.cause or EngineClosed("the process is going down")
        error: BaseException | None = cause if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TransferError):
            _LOG.error("a push by stream failed", exc_info=error)
            error = WireFailed(f"transfer {push.transfer_id}: {error}; push again under a new handle")
        del self._jobs[job]
        if self._lines.get(record.key) is task:
            del self._lines[record.key]
        push.state = PushState.DONE if error is None else PushState.FAILED
        description = job.peer.description
        if isinstance(error, PeerLost):
            self.peers.mark_lost(description.incarnation, description.rank)
        if self.ledger.settled(push, record):
            self._last_word(record)
        if error is None:
            push.settled.set_result(task.result())
        else:
            push.settled.set_exception(error)
        push.terminal.set_result(push.state)

    def _last_word(self, record: Outgoing) -> None:
        """Say it once, unless it went behind the last bytes or pushes are still on their way."""
        if not self.ledger.owes_notice(record) or record in self._saying:
            return
        peer = self.peers.find(record.handle.incarnation, record.handle.rank)
        if record.notified or peer is None or peer.lost:
            lost = PeerLost(record.handle.incarnation, "the terminal notice could not be sent")
            self.ledger.ended(record, None if record.notified else lost)
            return
        task = self._loop.create_task(self._say(record, peer.description))
        self._saying[record] = task
        task.add_done_callback(partial(self._said, record))

    async def _say(self, record: Outgoing, description: PeerDescription) -> None:
        notice = record.notice()
        async with asyncio.timeout(NOTICE_TIMEOUT_S):
            async with self._wire.open(description, record.handle, NOTICE_TIMEOUT_S) as stream:
                await stream.end(complete=notice.outcome is Outcome.OK, nbytes=notice.nbytes)
                await stream.close()

    def _said(self, record: Outgoing, task: asyncio.Task[None]) -> None:
        del self._saying[record]
        error = EngineClosed("the process is going down") if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TransferError):
            error = PeerLost(record.handle.incarnation, f"the terminal notice was not taken: {error!r}")
        self.ledger.ended(record, error)


def _read(source: MemoryRegion, items: Sequence[int], kind: ChecksumKind, sums: list[int]) -> list[bytes]:
    """Copies of items, and their checksums."""
    with side_stream(source.base.device):
        sums.extend(checksums(source.base, items, kind))
        if source.memory == "cpu":
            return [source.base[item].numpy().tobytes() for item in items]
        return [source.base[item].cpu().numpy().tobytes() for item in items]
