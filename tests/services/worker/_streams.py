"""Both ends of a byte stream in one process: real gRPC between them, and a landing region behind the receiver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch

from headrace.kvcache.handle import ChecksumKind, Handle
from headrace.kvcache.landing import LandingRegion
from headrace.kvcache.landing_types import LandingIdentity, PartChecksums, PartRequest, PartTarget
from headrace.kvcache.transfer.admission import LocalIdentity
from headrace.kvcache.transfer.base import PeerDescription, TransferSettings
from headrace.kvcache.transfer.pushes import Outcome, TerminalNotice
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole
from headrace.kvcache.transfer.routed import Mode, RoutedTransferEngine
from headrace.kvcache.transfer.wire import decode_envelope, encode_envelope
from headrace.services.runtime.health import Health
from headrace.services.runtime.ids import new_incarnation
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.server import ServiceServer
from headrace.services.runtime.settings import ListenSettings, RpcSettings
from headrace.services.worker.channels import Channels
from headrace.services.worker.notices import deliver_notices
from headrace.services.worker.row_wire import GrpcRowWire
from headrace.services.worker.signing import Signer
from headrace.services.worker.transfer_service import TransferServicer
from headrace.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc

LAYOUT, MODEL = b"l" * 32, b"m" * 32
ROW, SLOT, ROWS = 700_000, 2_600_000, 16
"""A slot is more than a message, a row most of one."""
PATIENCE_S = 60.0
SIGNER = Signer(("s" * 32,))


class Servicer(TransferServicer):
    """Takes nothing while `go_on` is not set."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def Write(self, request_iterator: Any, context: Any) -> transfer_pb2.WriteResponse:
        await self.go_on.wait()
        return await super().Write(request_iterator, context)


class End:
    """One process of the two."""

    def __init__(self, name: str, settings: TransferSettings, mode: Mode) -> None:
        self.peer = common_pb2.PeerId(replica_id=name, incarnation=new_incarnation())
        self.channels = Channels(RpcSettings())
        self.wire = GrpcRowWire(self.peer, self.channels, SIGNER)
        own = LocalIdentity(self.peer.incarnation, 0, LAYOUT, MODEL)
        self.transfer = RoutedTransferEngine(own, settings, self.wire, mode)

    async def close(self) -> None:
        await asyncio.to_thread(self.transfer.close)
        await self.channels.close()


class Receiver(End):
    """As decode: landing rows, their books, the service."""

    def __init__(self, settings: TransferSettings) -> None:
        super().__init__("decode-0", settings, Mode.AUTO)
        identity = LandingIdentity(self.peer.incarnation, LAYOUT, MODEL, ChecksumKind.XXH3_64)
        self.landing = LandingRegion(identity, row_bytes=ROW, slot_bytes=SLOT, num_rows=ROWS, num_slots=2)
        self.transfer.register(MemoryRegion("rows", self.landing.rows, RegionRole.LANDING_ROWS))
        self.transfer.register(MemoryRegion("slots", self.landing.slots, RegionRole.LANDING_SLOTS))
        self.notices: list[TerminalNotice] = []
        deliver_notices(self.transfer, self._take)
        self.servicer = Servicer(self.transfer.inbound, self.peer, SIGNER)
        self.server = ServiceServer(ListenSettings(), RpcSettings(), Metrics(), Health())
        self.server.add(
            transfer_pb2_grpc.add_TransferServiceServicer_to_server,
            self.servicer,
            transfer_pb2.DESCRIPTOR.services_by_name["TransferService"],
        )

    def _take(self, notices: object) -> None:
        for notice in notices:  # type: ignore[attr-defined]
            self.notices.append(notice)
            self.landing.notice(notice.transfer_id, complete=notice.outcome is Outcome.OK)

    def grant(self, name: str, rows: int, sender: common_pb2.PeerId | None, *, slot: bool = False) -> Handle:
        handle = self.landing.reserve(
            name,
            1,
            [PartRequest(None, tuple(range(rows)), slot)],
            deadline=1e12,
            sender=None if sender is None else sender.incarnation,
        )
        self.transfer.grant(handle, None if sender is None else sender.incarnation)
        return handle

    async def noticed(self, handle: Handle) -> TerminalNotice:
        """The notice of a transfer."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for notice in self.notices:
                    if notice.transfer_id == handle.transfer_id:
                        return notice
                await asyncio.sleep(0.01)

    def take(self, handle: Handle, sums: tuple[int, ...], slot: int | None = None) -> torch.Tensor:
        """What landed, verified."""
        rows, slots = torch.zeros((ROWS, ROW), dtype=torch.uint8), torch.zeros((2, SLOT), dtype=torch.uint8)
        part = handle.parts[0]
        target = PartTarget(tuple(range(len(part.rows))), None if slot is None else 0)
        self.landing.take(handle, [PartChecksums(sums, slot)], [target], rows, slots)
        return rows[: len(part.rows)]

    def assert_untouched(self) -> None:
        """No byte was written, by whatever was refused."""
        assert not self.landing.bytes.any()

    async def close(self) -> None:
        await self.server.stop()
        await super().close()


class Pair:
    """A sender that pushes by stream, and a receiver."""

    def __init__(self, settings: TransferSettings) -> None:
        self.sender = End("prefill-0", settings, Mode.STREAM)
        self.receiver = Receiver(settings)
        self.pool = torch.randint(1, 256, (ROWS, ROW), dtype=torch.uint8)
        self.slots = torch.randint(1, 256, (2, SLOT), dtype=torch.uint8)
        self.sender.transfer.register(MemoryRegion("pool", self.pool))
        self.sender.transfer.register(MemoryRegion("slot pool", self.slots))

    @property
    def description(self) -> PeerDescription:
        return self.receiver.transfer.describe()

    async def connect(self) -> str:
        return await asyncio.wrap_future(self.sender.transfer.connect(self.description))

    def grant(self, name: str, rows: int, *, slot: bool = False) -> Handle:
        return self.receiver.grant(name, rows, self.sender.peer, slot=slot)

    def stub(self, channel: object) -> transfer_pb2_grpc.TransferServiceAsyncStub:
        return transfer_pb2_grpc.TransferServiceStub(channel)  # type: ignore[arg-type,return-value]

    async def until(self, check: object) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not check():  # type: ignore[operator]  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def pair(**settings: object) -> AsyncIterator[Pair]:
    one = Pair(TransferSettings(net_devices="none", **settings))  # type: ignore[arg-type]
    await one.receiver.server.start()
    one.receiver.transfer.listen(one.receiver.server.address)
    try:
        await one.connect()
        yield one
        await one.until(lambda: one.sender.transfer.stats().idle)
        assert not one.receiver.transfer.inbound.open_streams
    finally:
        await one.sender.close()
        await one.receiver.close()


def elsewhere(description: PeerDescription) -> PeerDescription:
    """The same agent, as of another host."""
    envelope = decode_envelope(description.agent_metadata)
    moved = replace(envelope, process=replace(envelope.process, boot_id="another"))
    return replace(description, agent_metadata=encode_envelope(moved))
