"""The receiving side of byte streams: which transfers may be written by one, and the writing itself (L1, L7).

Where a peer's memory cannot be written directly, rows arrive in messages and this process writes them into its own
landing rows. So it can do what no target of a remote write can: close a stream. What is closed writes nothing more,
whatever its sender still has on the wire, and its transfer is over here and now, with a notice of this side's own.

A transfer is open from its grant to its terminal notice, ``close`` or its sender's death, whichever comes first; the
landing rows of one that is open are not free (landing_books.py), so no stream writes rows that are another's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.kvcache.handle import Handle
from headrace.kvcache.last_keys import LastKeys
from headrace.kvcache.transfer.errors import Refusal, StreamRefused
from headrace.kvcache.transfer.ledger import REMEMBERED
from headrace.kvcache.transfer.pushes import Outcome, TerminalNotice
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole

Item = tuple[RegionRole, int]
"""A landing row or slot."""
STREAM = "stream"
"""What this wire is called in results and statistics."""


@dataclass(eq=False)
class _Grant:
    """A transfer that may be written."""

    handle: Handle
    sender: str | None
    stream: InboundStream | None = None
    """The one that writes now."""
    written: dict[Item, int] = field(default_factory=dict)
    """Bytes of each item so far."""
    landed: int = 0

    def __post_init__(self) -> None:
        handle = self.handle
        self.granted: frozenset[Item] = frozenset(
            [(RegionRole.LANDING_ROWS, row) for row in handle.landing_rows]
            + [(RegionRole.LANDING_SLOTS, slot) for slot in handle.landing_slots]
        )


class InboundStreams:
    """All of one process. Any thread may call; a lock is held while a piece is written, so that closing is exact."""

    def __init__(self, regions: Callable[[], Mapping[str, MemoryRegion]]) -> None:
        """`regions`: what is registered now, by name."""
        self._regions = regions
        self._lock = threading.RLock()
        self._grants: dict[str, _Grant] = {}
        self._dead: LastKeys[str] = LastKeys(REMEMBERED)
        self._streamers: LastKeys[str] = LastKeys(REMEMBERED)
        """Senders that wrote by stream: those write by nothing else."""
        self._notices: deque[TerminalNotice] = deque()
        self.wake: Callable[[], None] = lambda: None
        """Called after a notice, on the thread that caused it."""
        self.notices = 0
        """Since start."""
        self.bytes_landed = 0
        """Since start."""

    # --- who may write -----------------------------------------------------------------------------------------

    def grant(self, handle: Handle, sender: str | None) -> None:
        """See TransferEngine.grant."""
        with self._lock:
            if sender not in self._dead:
                self._grants[handle.transfer_id] = _Grant(handle, sender)

    def close(self, transfer_id: str) -> None:
        """Nothing more is written under it. A transfer that had begun to arrive by stream is over with that, and its
        notice says so."""
        with self._lock:
            grant = self._grants.get(transfer_id)
            if grant is not None:
                self._end(grant, Outcome.FAILED if grant.sender in self._streamers else None)

    def sender_died(self, incarnation: str) -> tuple[str, ...]:
        """See TransferEngine.sender_died. Returns the transfers that it was to write."""
        with self._lock:
            self._dead.add(incarnation)
            grants = self._of(incarnation)
            for grant in grants:
                self._end(grant, None)
        return tuple(grant.handle.transfer_id for grant in grants)

    def sender_left(self, incarnation: str, *, streams_only: bool) -> int:
        """A sender that cannot be looked at has left the cluster. If it can write by nothing but streams, or is known
        to, its transfers end here, so that their rows come free. Returns how many there were."""
        with self._lock:
            if not streams_only and incarnation not in self._streamers:
                return 0
            grants = self._of(incarnation)
            for grant in grants:
                self._end(grant, Outcome.FAILED)
            return len(grants)

    @property
    def open_transfers(self) -> int:
        """Transfers that may be written."""
        return len(self._grants)

    @property
    def open_streams(self) -> int:
        """Streams that write now."""
        with self._lock:
            return sum(grant.stream is not None for grant in self._grants.values())

    def take_notices(self) -> list[TerminalNotice]:
        """See TransferEngine.take_notices."""
        with self._lock:
            taken = list(self._notices)
            self._notices.clear()
        return taken

    # --- writing -----------------------------------------------------------------------------------------------

    def begin(self, handle: Handle, sender: str) -> InboundStream:
        """A stream of one push. One that was open for the same transfer has been given up by its sender, and the
        transfer with it.

        Raises StreamRefused: ENDED for a transfer that is not open, SENDER, CONFLICT, TARGET and so on for a handle
        that differs from the grant. Nothing is changed.
        """
        with self._lock:
            grant = self._grants.get(handle.transfer_id)
            if grant is None:
                raise StreamRefused(Refusal.ENDED, f"transfer {handle.transfer_id} is not open here; reserve again")
            reasons = handle.check(grant.handle)
            if reasons:
                differ = ", ".join(reasons)
                raise StreamRefused(Refusal.CONFLICT, f"the handle is not the grant, these differ: {differ}")
            if grant.sender not in (None, sender):
                raise StreamRefused(Refusal.SENDER, "these rows were granted to another process")
            if grant.stream is not None:
                self._end(grant, Outcome.FAILED)
                raise StreamRefused(Refusal.ENDED, f"transfer {handle.transfer_id} broke off; reserve again")
            grant.sender = sender
            self._streamers.add(sender)
            grant.stream = stream = InboundStream(self, grant)
            return stream

    def _write(self, stream: InboundStream, item: Item, offset: int, data: bytes) -> None:
        with self._lock:
            grant = stream.grant
            if grant.stream is not stream:
                raise StreamRefused(Refusal.ENDED, f"transfer {grant.handle.transfer_id} is over; reserve again")
            region = self._target(grant, item)
            done = grant.written.get(item, 0)
            if not data or offset != done or done + len(data) > region.item_bytes:
                raise StreamRefused(
                    Refusal.SIZES,
                    f"{len(data)} B at {offset} of {item[0]} {item[1]}, of which {done} of {region.item_bytes} B are "
                    "here; every byte comes once and in order",
                )
            _put(region.base[item[1]], offset, data)
            grant.written[item] = done + len(data)
            grant.landed += len(data)
            stream.nbytes += len(data)
            self.bytes_landed += len(data)

    def _target(self, grant: _Grant, item: Item) -> MemoryRegion:
        handle, (role, index) = grant.handle, item
        if item not in grant.granted:
            raise StreamRefused(Refusal.TARGET, f"{role} {index} is not granted by handle {handle.transfer_id}")
        size = _size(handle, item)
        for region in self._regions().values():
            place = (region.role, region.payload, region.version)
            fits = index < region.items and size == region.item_bytes
            if fits and place == (role, handle.payload, handle.metadata_version):
                return region
        raise StreamRefused(Refusal.METADATA_VERSION, f"no {role} region {handle.metadata_version} is here any more")

    def _finish(self, stream: InboundStream, *, complete: bool | None, nbytes: int) -> None:
        """`complete` None: more pushes follow."""
        with self._lock:
            grant = stream.grant
            if grant.stream is not stream:
                raise StreamRefused(Refusal.ENDED, f"transfer {grant.handle.transfer_id} is over; reserve again")
            partial = [item for item, done in grant.written.items() if done < _size(grant.handle, item)]
            if partial and complete is not False:
                raise StreamRefused(Refusal.SIZES, f"{len(partial)} rows or slots are not whole")
            if complete and nbytes != grant.landed:
                raise StreamRefused(Refusal.SIZES, f"{grant.landed} B are here, the sender has sent {nbytes} B")
            grant.stream = None
            if complete is not None:
                self._end(grant, Outcome.OK if complete else Outcome.FAILED)

    def _abandon(self, stream: InboundStream) -> None:
        with self._lock:
            if stream.grant.stream is stream:
                self._end(stream.grant, Outcome.FAILED)

    # --- inside ------------------------------------------------------------------------------------------------

    def _of(self, incarnation: str) -> list[_Grant]:
        return [grant for grant in self._grants.values() if grant.sender == incarnation]

    def _end(self, grant: _Grant, outcome: Outcome | None) -> None:
        """With the lock held. `outcome` None: whoever closes it tells the landing region."""
        handle = grant.handle
        del self._grants[handle.transfer_id]
        grant.stream = None
        if outcome is None:
            return
        self._notices.append(
            TerminalNotice(
                transfer_id=handle.transfer_id,
                request_id=handle.request_id,
                attempt=handle.attempt,
                generation=handle.generation,
                outcome=outcome,
                nbytes=grant.landed,
                sender=grant.sender or "",
            )
        )
        self.notices += 1
        self.wake()


class InboundStream:
    """One push as it arrives. Ends with ``finish`` or ``end``; ``abandon`` is for every other way out."""

    def __init__(self, owner: InboundStreams, grant: _Grant) -> None:
        self._owner = owner
        self.grant = grant
        self.nbytes = 0
        """Of this stream."""

    def write(self, role: RegionRole, item: int, offset: int, data: bytes) -> None:
        """Bytes of one landing row or slot. Raises StreamRefused; nothing is written then."""
        self._owner._write(self, (role, item), offset, data)

    def finish(self) -> None:
        """The push is whole, and more follow. Raises StreamRefused when it is not."""
        self._owner._finish(self, complete=None, nbytes=0)

    def end(self, *, complete: bool, nbytes: int) -> None:
        """The sender's last word. Raises StreamRefused when it claims what is not here."""
        self._owner._finish(self, complete=complete, nbytes=nbytes)

    def abandon(self) -> None:
        """It broke off: nothing more is written, and the transfer is over. A no-op after its end."""
        self._owner._abandon(self)


def _size(handle: Handle, item: Item) -> int:
    return handle.row_bytes if item[0] is RegionRole.LANDING_ROWS else handle.slot_bytes


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _put(target: torch.Tensor, offset: int, data: bytes) -> None:
    """Into a row, uint8 [bytes]; it has arrived when this returns."""
    if target.device.type == "cpu":
        target.numpy()[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
        return
    with side_stream(target.device):
        target[offset : offset + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    """Copies between host and device run beside the engine's kernels, not behind them."""
    if device.type != "cuda":
        return nullcontext()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(_streams[device])
