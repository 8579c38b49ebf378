"""The decode side of one run: where rows go, the pushes so far, the checksums for the commit, the last word.

All pushes of a run stay listed until they are terminal, since the rows they read are pinned until then (L7).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from headrace.engine.messages import BlockRow
from headrace.kvcache.handle import Handle, LandingPart
from headrace.kvcache.transfer.base import TransferEngine
from headrace.kvcache.transfer.errors import TransferError
from headrace.kvcache.transfer.pushes import Outcome, Push, PushResult, Ready, RowMove
from headrace.kvcache.transfer.regions import RegionRole
from headrace.kvcache.transfer.wire_job import PushState
from headrace.services.runtime.errors import InvalidArgument
from headrace.services.worker.engine_host import ROWS, SLOTS
from headrace.services.worker.signing import Signer
from headrace.services.worker.transfer_wire import checksums_to_wire, handle_to_wire
from headrace.v1 import common_pb2


@dataclass(eq=False)
class _Sent:
    """One push, and what its items are."""

    push: Push
    blocks: tuple[int, ...]
    slot: bool


class HandOverTarget:
    """One grant at a time: the reservation's, then those of resends."""

    def __init__(self, transfer: TransferEngine, handle: Handle) -> None:
        self._loop = asyncio.get_running_loop()
        self._transfer = transfer
        self.on_failed: Callable[[TransferError], None] = lambda error: None
        """Called on the loop when a push fails, whether or not somebody waits for it."""
        self._rows: dict[int, int] = {}
        """Pool row of every block that was pushed; they stay pinned for a resend."""
        self._slot: int | None = None
        self._sums: dict[int, int] = {}
        self._slot_sum: int | None = None
        self._pushes: list[_Sent] = []
        self._all: list[Push] = []
        self._adopted = False
        self.handle = handle
        self.sent: Counter[str] = Counter()
        """Bytes that landed, by transport."""
        self.resent_bytes = 0

    @property
    def rows_pushed(self) -> int:
        """Rows handed to the wire, resends included."""
        return sum(len(sent.blocks) for sent in self._pushes)

    def push(
        self,
        rows: Sequence[BlockRow],
        timeout_s: float,
        *,
        slot: int | None = None,
        last: bool = False,
        ready: Ready | None = None,
    ) -> None:
        """Send finished rows that the grant covers. `last`: nothing follows, the terminal notice rides behind. `ready`:
        tells when the device has written them.

        Raises TransferError when the push is refused.
        """
        for row in rows:
            self._rows[row.block] = row.row
        if slot is not None:
            self._slot = slot
        part = shared_part(self.handle)
        places = dict(zip(part.blocks, part.rows, strict=True))
        wanted = [row for row in rows if row.block in places]
        moves: list[RowMove] = []
        if wanted:
            sources = tuple(row.row for row in wanted)
            moves.append(RowMove(ROWS, sources, tuple(places[row.block] for row in wanted)))
        with_slot = part.slot is not None and slot is not None
        if part.slot is not None and slot is not None:
            moves.append(RowMove(SLOTS, (slot,), (part.slot,), RegionRole.LANDING_SLOTS))
        if not moves:
            return
        push = self._transfer.push(self.handle, moves, timeout_s=timeout_s, last=last, ready=ready)
        self._pushes.append(_Sent(push, tuple(row.block for row in wanted), with_slot))
        self._all.append(push)
        push.settled.add_done_callback(self._settled)

    def _settled(self, done: Future[PushResult]) -> None:
        """On the transfer thread."""
        error = done.exception()
        if isinstance(error, TransferError):
            self._loop.call_soon_threadsafe(self.on_failed, error)

    async def settle(self) -> None:
        """Wait until everything pushed has landed and end the transfer. Raises TransferError."""
        for sent in self._pushes:
            result = await sent.push
            sums = list(result.checksums)
            if sent.blocks:
                self._sums.update(zip(sent.blocks, sums.pop(0), strict=True))
            if sent.slot:
                (self._slot_sum,) = sums.pop(0)
            self.sent[result.transport] += result.nbytes
            if self._adopted:
                self.resent_bytes += result.nbytes
        await asyncio.wrap_future(self._transfer.end(self.handle, Outcome.OK))

    def checksums(self) -> list[common_pb2.PartChecksums]:
        """Of the current grant, in its order. Raises KeyError when something of it was not pushed."""
        part = shared_part(self.handle)
        rows = [self._sums[block] for block in part.blocks]
        return [checksums_to_wire(rows, self._slot_sum if part.slot is not None else None)]

    def adopt(self, handle: Handle) -> None:
        """A new grant takes the old one's place; its last word is this side's to say from now on."""
        self._adopted = True
        self._pushes = []
        self.handle = handle

    def push_again(self, timeout_s: float) -> None:
        """Push what an adopted grant covers. Raises TransferError when the push is refused."""
        part = shared_part(self.handle)
        rows = [BlockRow(block, self._rows[block]) for block in part.blocks]
        self.push(rows, timeout_s, slot=self._slot if part.slot is not None else None, last=True)

    def give_up(self) -> None:
        """Send nothing more of this grant than what is on the wire already."""
        self._transfer.cut(self.handle)

    async def silent(self) -> None:
        """Wait until no byte of any push is on the wire; a deadline does not end that (L6)."""
        for push in self._all:
            await asyncio.wrap_future(push.terminal)

    async def end(self) -> None:
        """Say the last word of a transfer that is given up. Raises TransferError when the receiver was not told."""
        await asyncio.wrap_future(self._transfer.end(self.handle, Outcome.FAILED))

    @property
    def failed(self) -> bool:
        """Some push failed on the wire."""
        return any(push.state is PushState.FAILED for push in self._all)

    def wire_handle(self, replica_id: str, signer: Signer) -> common_pb2.TransferHandle:
        """The current grant."""
        return handle_to_wire(self.handle, replica_id, 0.0, signer)


def shared_part(handle: Handle) -> LandingPart:
    """The one part of a KV grant: blocks, and the slot, that all choices start from. Raises InvalidArgument."""
    if len(handle.parts) != 1 or handle.parts[0].choice is not None:
        raise InvalidArgument("one part, shared by all choices, is expected", field="target.landing.parts")
    return handle.parts[0]
