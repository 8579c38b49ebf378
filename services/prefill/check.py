"""Is the grant that comes with a run exact? Everything that can be checked before anything is held (L1, L4, L10)."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kvcache.handle import Handle
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.transfer.base import PeerDescription
from headrace.services.prefill.target import shared_part
from headrace.services.runtime.errors import Incompatible, InvalidArgument
from headrace.services.worker.signing import Signer
from headrace.services.worker.transfer_wire import agent_from_wire, handle_from_wire
from headrace.v1 import prefill_pb2


@dataclass(frozen=True)
class Target:
    """Where the KV of a run goes, checked as far as this side can."""

    wire: prefill_pb2.DecodeTarget
    handle: Handle
    agent: PeerDescription


def check_target(request: prefill_pb2.RunRequest, layout: KVLayout, signer: Signer) -> Target:
    """The grant is of this cluster, for this request, and covers exactly the blocks that decode does not hold (L1, L4,
    L25)."""
    wire = request.target
    handle = handle_from_wire(wire.landing, "target.landing", signer, fresh=True)
    agent = agent_from_wire(wire.agent, "target.agent", signer)
    part = shared_part(handle)
    if not wire.endpoint:
        raise InvalidArgument("names no address", field="target.endpoint")
    if {handle.incarnation, agent.incarnation} != {wire.peer.incarnation}:
        raise InvalidArgument("landing, agent and peer are of different processes", field="target.peer")
    if (handle.request_id, handle.attempt) != (request.spec.id.request_id, request.spec.id.attempt):
        raise InvalidArgument("the grant is another request's", field="target.landing.id")
    if (handle.row_bytes, handle.slot_bytes) != (layout.block_bytes, layout.slot_bytes):
        raise Incompatible("sizes differ from this worker's layout", field="target.landing.row_bytes")
    known = len(request.spec.token_ids) + sum(len(choice.delivered_token_ids) for choice in request.spec.choices[:1])
    wanted = tuple(range(wire.held_blocks, layout.blocks_for(known)))
    if part.blocks != wanted or (part.slot is not None) != (layout.slot_bytes > 0):
        raise InvalidArgument(
            f"the grant covers blocks {part.blocks[:1]}…{part.blocks[-1:]}, the run makes {len(wanted)} from "
            f"{wire.held_blocks} on",
            field="target.landing.parts",
        )
    return Target(wire, handle, agent)
