"""Transfer handles, agents and checksums: wire form ↔ kvcache's dataclasses. For workers only (imports torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.kvcache.handle import ChecksumKind, Handle, LandingPart, PayloadKind
from headrace.kvcache.transfer.base import PeerDescription
from headrace.kvcache.transfer.regions import RegionDescription, RegionRole
from headrace.services.runtime.durations import seconds
from headrace.services.runtime.errors import InvalidArgument
from headrace.services.worker.signing import Signer
from headrace.v1 import common_pb2

_CHECKSUMS: Final = {
    ChecksumKind.XXH3_64: common_pb2.CHECKSUM_KIND_XXH3_64,
    ChecksumKind.LANES_64: common_pb2.CHECKSUM_KIND_LANES_64,
}
_PAYLOADS: Final = {
    PayloadKind.KV: common_pb2.PAYLOAD_KIND_KV,
    PayloadKind.EMBEDDING: common_pb2.PAYLOAD_KIND_EMBEDDING,
}
_MEMORY: Final = {
    "cpu": common_pb2.MEMORY_KIND_HOST,
    "cuda": common_pb2.MEMORY_KIND_CUDA,
    "npu": common_pb2.MEMORY_KIND_ASCEND,
}
_USES: Final = {
    RegionRole.LANDING_ROWS: common_pb2.REGION_USE_UNSPECIFIED,
    RegionRole.LANDING_SLOTS: common_pb2.REGION_USE_UNSPECIFIED,
    RegionRole.READABLE: common_pb2.REGION_USE_READABLE,
    RegionRole.FETCHED: common_pb2.REGION_USE_FETCHED,
}
_CHECKSUM_OF: Final[dict[int, ChecksumKind]] = {number: kind for kind, number in _CHECKSUMS.items()}
_PAYLOAD_OF: Final[dict[int, PayloadKind]] = {number: kind for kind, number in _PAYLOADS.items()}
_MEMORY_OF: Final[dict[int, str]] = {number: kind for kind, number in _MEMORY.items()}


def handle_to_wire(handle: Handle, replica_id: str, time_left_s: float, signer: Signer) -> common_pb2.TransferHandle:
    """`replica_id` is the receiver's name; the handle itself knows only its incarnation."""
    wire = common_pb2.TransferHandle(
        transfer_id=handle.transfer_id,
        receiver=common_pb2.PeerId(replica_id=replica_id, incarnation=handle.incarnation),
        rank=handle.rank,
        id=common_pb2.AttemptId(request_id=handle.request_id, attempt=handle.attempt),
        generation=handle.generation,
        layout_fingerprint=handle.layout_fingerprint,
        model_fingerprint=handle.model_fingerprint,
        payload=_PAYLOADS[handle.payload],
        parts=[
            common_pb2.LandingPart(choice=part.choice, blocks=part.blocks, rows=part.rows, slot=part.slot)
            for part in handle.parts
        ],
        row_bytes=handle.row_bytes,
        slot_bytes=handle.slot_bytes,
        checksum=_CHECKSUMS[handle.checksum_kind],
        metadata_version=handle.metadata_version,
        time_left_ms=max(0, round(time_left_s * 1000)),
    )
    return signer.handle(wire)


def handle_from_wire(wire: common_pb2.TransferHandle, field: str, signer: Signer, *, fresh: bool = False) -> Handle:
    """`fresh`: something is to be written by it, so its time must not be over.

    Raises InvalidArgument naming the field for anything that no handle could be, PermissionDenied for a forged or
    altered one, FailedPrecondition for a stale one."""
    signer.check_handle(wire, field, fresh=fresh)
    seconds(wire.time_left_ms, f"{field}.time_left_ms")
    if wire.checksum not in _CHECKSUM_OF:
        raise InvalidArgument(f"checksum kind {wire.checksum} is unknown", field=f"{field}.checksum")
    if wire.payload not in _PAYLOAD_OF:
        raise InvalidArgument(f"payload kind {wire.payload} is unknown", field=f"{field}.payload")
    try:
        parts = tuple(
            LandingPart(
                choice=part.choice if part.HasField("choice") else None,
                blocks=tuple(part.blocks),
                rows=tuple(part.rows),
                slot=part.slot if part.HasField("slot") else None,
            )
            for part in wire.parts
        )
    except ValueError as error:
        raise InvalidArgument(str(error), field=f"{field}.parts") from error
    return Handle(
        transfer_id=wire.transfer_id,
        incarnation=wire.receiver.incarnation,
        request_id=wire.id.request_id,
        attempt=wire.id.attempt,
        generation=wire.generation,
        layout_fingerprint=wire.layout_fingerprint,
        model_fingerprint=wire.model_fingerprint,
        parts=parts,
        row_bytes=wire.row_bytes,
        slot_bytes=wire.slot_bytes,
        checksum_kind=_CHECKSUM_OF[wire.checksum],
        rank=wire.rank,
        payload=_PAYLOAD_OF[wire.payload],
        metadata_version=wire.metadata_version,
    )


def agent_to_wire(
    agent: PeerDescription, replica_id: str, model: common_pb2.ModelIdentity, signer: Signer
) -> common_pb2.TransferAgent:
    """How peers reach this process's transfer agent."""
    wire = common_pb2.TransferAgent(
        owner=common_pb2.PeerId(replica_id=replica_id, incarnation=agent.incarnation),
        rank=agent.rank,
        agent_name=agent.agent_name,
        agent_metadata=agent.agent_metadata,
        metadata_version=agent.metadata_version,
        regions=[
            common_pb2.LandingRegion(
                payload=_PAYLOADS[region.payload],
                slots=region.role is RegionRole.LANDING_SLOTS,
                base_address=region.base_address,
                item_bytes=region.item_bytes,
                items=region.items,
                memory=_MEMORY[region.memory],
                device_id=region.device_id,
                use=_USES[region.role],
            )
            for region in agent.regions
        ],
        model=model,
        checksums=[_CHECKSUMS[kind] for kind in agent.checksums],
        listener=agent.listener,
    )
    return signer.agent(wire)


def agent_from_wire(wire: common_pb2.TransferAgent, field: str, signer: Signer) -> PeerDescription:
    """Raises InvalidArgument naming the field for an agent that cannot be reached, PermissionDenied for a forged or
    altered one."""
    signer.check_agent(wire, field)
    regions = []
    for region in wire.regions:
        if region.payload not in _PAYLOAD_OF or region.memory not in _MEMORY_OF or region.use not in _USES.values():
            raise InvalidArgument("a region has an unknown payload, memory kind or use", field=f"{field}.regions")
        regions.append(
            RegionDescription(
                payload=_PAYLOAD_OF[region.payload],
                role=_role(region),
                base_address=region.base_address,
                item_bytes=region.item_bytes,
                items=region.items,
                memory=_MEMORY_OF[region.memory],
                device_id=region.device_id,
            )
        )
    if not wire.agent_name or not wire.owner.incarnation:
        raise InvalidArgument("the agent has no name or owner", field=field)
    return PeerDescription(
        incarnation=wire.owner.incarnation,
        rank=wire.rank,
        agent_name=wire.agent_name,
        agent_metadata=wire.agent_metadata,
        metadata_version=wire.metadata_version,
        regions=tuple(regions),
        layout_fingerprint=wire.model.layout_fingerprint or None,
        model_fingerprint=wire.model.model_fingerprint,
        checksums=tuple(_CHECKSUM_OF[kind] for kind in wire.checksums if kind in _CHECKSUM_OF),
        listener=wire.listener,
    )


def _role(region: common_pb2.LandingRegion) -> RegionRole:
    if region.use == common_pb2.REGION_USE_READABLE:
        return RegionRole.READABLE
    if region.use == common_pb2.REGION_USE_FETCHED:
        return RegionRole.FETCHED
    return RegionRole.LANDING_SLOTS if region.slots else RegionRole.LANDING_ROWS


def checksums_to_wire(rows: Sequence[int], slot: int | None = None) -> common_pb2.PartChecksums:
    """Checksums of one part, rows in the part's order."""
    return common_pb2.PartChecksums(rows=rows, slot=slot)
