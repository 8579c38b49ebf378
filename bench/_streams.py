"""One end of a byte stream over mutual TLS for benchmarks that are not asyncio: an engine and its loop on a thread."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from headrace.cli.certificates import issue, make_authority
from headrace.kvcache.handle import Handle
from headrace.kvcache.transfer.admission import LocalIdentity
from headrace.kvcache.transfer.base import NO_NETWORK, TransferSettings
from headrace.kvcache.transfer.routed import Mode, RoutedTransferEngine
from headrace.services.runtime.health import Health
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.peers import Peer, PeerRole
from headrace.services.runtime.server import ServiceServer
from headrace.services.runtime.settings import ListenSettings, RpcSettings
from headrace.services.runtime.tls import Tls
from headrace.services.worker.channels import Channels
from headrace.services.worker.row_wire import GrpcRowWire
from headrace.services.worker.signing import Signer
from headrace.services.worker.transfer_service import TransferServicer
from headrace.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc

T = TypeVar("T")
SENDER, RECEIVER = "prefill-0", "decode-0"
SIGNER = Signer(("of a benchmark, known to both ends, ",))


def make_certificates(folder: Path) -> None:
    """Of both ends."""
    make_authority(folder)
    for role, name in ((PeerRole.PREFILL, SENDER), (PeerRole.DECODE, RECEIVER)):
        issue(folder, Peer(role, name), ("127.0.0.1",))


class _Granting(TransferServicer):
    """Takes every handle for a grant: what is measured is the way of the bytes."""

    def _admit(self, begin: transfer_pb2.WriteBegin) -> Handle:
        handle = super()._admit(begin)
        self._inbound.grant(handle, None)
        return handle


class StreamEnd:
    """A process's end. Close it."""

    def __init__(self, folder: Path, name: str, layout: bytes, model: bytes) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="streams", daemon=True)
        self._thread.start()
        self._server: ServiceServer | None = None
        self._call(self._open(folder, name, layout, model))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _open(self, folder: Path, name: str, layout: bytes, model: bytes) -> None:
        peer = common_pb2.PeerId(replica_id=name, incarnation=uuid.uuid4().hex)
        tls = Tls(folder / "ca.crt", folder / f"{name}.crt", folder / f"{name}.key")
        self._channels = Channels(RpcSettings(), tls)
        self.engine = RoutedTransferEngine(
            LocalIdentity(peer.incarnation, 0, layout, model),
            TransferSettings(net_devices=NO_NETWORK),
            GrpcRowWire(peer, self._channels, SIGNER),
            Mode.STREAM,
        )
        if name == RECEIVER:
            self._server = ServiceServer(ListenSettings(), RpcSettings(), Metrics(), Health(), tls=tls)
            self._server.add(
                transfer_pb2_grpc.add_TransferServiceServicer_to_server,
                _Granting(self.engine.inbound, peer, SIGNER),
                transfer_pb2.DESCRIPTOR.services_by_name["TransferService"],
            )
            await self._server.start()
            self.engine.listen(self._server.address)

    async def _shut(self) -> None:
        if self._server is not None:
            await self._server.stop()
        await asyncio.to_thread(self.engine.close)
        await self._channels.close()

    def close(self) -> None:
        """End the loop and its thread."""
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
