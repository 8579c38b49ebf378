"""The transfer engine of a process, and the service by which it takes rows by stream."""

from __future__ import annotations

import asyncio
from functools import partial

from headrace.kvcache.transfer.admission import LocalIdentity
from headrace.kvcache.transfer.routed import Mode, RoutedTransferEngine
from headrace.services.runtime.process import ServiceProcess
from headrace.services.worker.channels import Channels
from headrace.services.worker.row_wire import GrpcRowWire
from headrace.services.worker.signing import Signer
from headrace.services.worker.transfer_service import TransferServicer
from headrace.services.worker.transfer_settings import TransferSection
from headrace.v1 import transfer_pb2, transfer_pb2_grpc


def open_transfer(
    settings: TransferSection,
    process: ServiceProcess,
    channels: Channels,
    signer: Signer,
    *,
    layout_fingerprint: bytes | None,
    model_fingerprint: bytes,
) -> RoutedTransferEngine:
    """Closed with the life. Raises NixlMissing, SettingsError."""
    transfer = RoutedTransferEngine(
        LocalIdentity(process.life.incarnation, 0, layout_fingerprint, model_fingerprint),
        settings.engine_settings(tls=process.tls is not None),
        GrpcRowWire(process.peer, channels, signer, int(process.settings.rpc.max_message_bytes)),
        Mode(settings.transport),
    )
    process.life.on_close("transfer", partial(asyncio.to_thread, transfer.close))
    return transfer


def take_streams(
    settings: TransferSection, process: ServiceProcess, transfer: RoutedTransferEngine, signer: Signer
) -> None:
    """Serve TransferService beside what else the process serves; before its port opens. `transfer.listen` tells peers
    of it afterwards."""
    if settings.transport == "nixl":
        return
    process.server.add(
        transfer_pb2_grpc.add_TransferServiceServicer_to_server,
        TransferServicer(transfer.inbound, process.peer, signer),
        transfer_pb2.DESCRIPTOR.services_by_name["TransferService"],
    )
    process.metrics.gauge(
        "inbound_streams", "Streams of rows that are being written", lambda: transfer.inbound.open_streams
    )
    process.metrics.gauge(
        "inbound_stream_bytes", "Bytes that landed by stream since start", lambda: transfer.inbound.bytes_landed
    )
