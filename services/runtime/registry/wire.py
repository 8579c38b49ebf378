"""Replica ↔ headrace.v1.Replica: what the embedded registry sends and etcd stores."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from headrace.services.runtime.registry.base import Capacity, Rank, Replica, Role, State
from headrace.v1 import common_pb2, registry_pb2

_ROLES: Final = {
    Role.ROUTER: common_pb2.ROLE_ROUTER,
    Role.ENCODER: common_pb2.ROLE_ENCODER,
    Role.PREFILL: common_pb2.ROLE_PREFILL,
    Role.DECODE: common_pb2.ROLE_DECODE,
    Role.WHOLE: common_pb2.ROLE_WHOLE,
}
_STATES: Final = {
    State.STARTING: registry_pb2.REPLICA_STATE_STARTING,
    State.READY: registry_pb2.REPLICA_STATE_READY,
    State.DRAINING: registry_pb2.REPLICA_STATE_DRAINING,
    State.UNREADY: registry_pb2.REPLICA_STATE_UNREADY,
}
_ROLE_OF: Final = {number: role for role, number in _ROLES.items()}
_STATE_OF: Final = {number: state for state, number in _STATES.items()}


class WireError(ValueError):
    """A message says nothing that a replica could be; the text names the field."""


def role_to_wire(role: Role) -> common_pb2.Role.ValueType:
    """Proto number of a role."""
    return _ROLES[role]


def role_from_wire(number: int) -> Role:
    """Raises WireError for ROLE_UNSPECIFIED and numbers of a later version."""
    if number not in _ROLE_OF:
        raise WireError(f"role {number} is unknown")
    return _ROLE_OF[common_pb2.Role.ValueType(number)]


def state_to_wire(state: State) -> registry_pb2.ReplicaState.ValueType:
    """Proto number of a state."""
    return _STATES[state]


def state_from_wire(number: int) -> State:
    """Raises WireError for REPLICA_STATE_UNSPECIFIED and numbers of a later version."""
    if number not in _STATE_OF:
        raise WireError(f"state {number} is unknown")
    return _STATE_OF[registry_pb2.ReplicaState.ValueType(number)]


def ranks_to_wire(ranks: tuple[Rank, ...]) -> list[registry_pb2.Rank]:
    """Proto ranks; `agent` must be a serialised TransferAgent."""
    wired = []
    for rank in ranks:
        message = registry_pb2.Rank(index=rank.index, device=rank.device)
        if rank.agent:
            message.agent.ParseFromString(rank.agent)
        wired.append(message)
    return wired


def loads_to_wire(loads: tuple[bytes, ...]) -> list[common_pb2.LoadReport]:
    """Proto load reports."""
    return [common_pb2.LoadReport.FromString(load) for load in loads]


def to_wire(replica: Replica) -> registry_pb2.Replica:
    """The message of a replica."""
    message = registry_pb2.Replica(
        peer=common_pb2.PeerId(replica_id=replica.id, incarnation=replica.incarnation),
        role=_ROLES[replica.role],
        data_centre=replica.data_centre,
        host=replica.host,
        endpoint=replica.endpoint,
        capacity=registry_pb2.Capacity(**asdict(replica.capacity)),
        ranks=ranks_to_wire(replica.ranks),
        state=_STATES[replica.state],
        metrics_endpoint=replica.metrics_endpoint,
        version=replica.version,
        pid=replica.pid,
        started_unix_ms=replica.started_unix_ms,
        loads=loads_to_wire(replica.loads),
    )
    if replica.model_name:
        message.model.name = replica.model_name
        message.model.model_fingerprint = replica.model_fp
        message.model.layout_fingerprint = replica.layout_fp
        message.model.row_fingerprint = replica.row_fp
    return message


def from_wire(message: registry_pb2.Replica) -> Replica:
    """The replica of a message; raises WireError, and ValueError for what Replica refuses."""
    capacity = message.capacity
    return Replica(
        id=message.peer.replica_id,
        incarnation=message.peer.incarnation,
        role=role_from_wire(message.role),
        data_centre=message.data_centre,
        host=message.host,
        endpoint=message.endpoint,
        state=state_from_wire(message.state),
        model_name=message.model.name,
        layout_fp=message.model.layout_fingerprint,
        row_fp=message.model.row_fingerprint,
        model_fp=message.model.model_fingerprint,
        capacity=Capacity(
            rows=capacity.rows,
            slots=capacity.slots,
            snapshots=capacity.snapshots,
            block_tokens=capacity.block_tokens,
            queue_requests=capacity.queue_requests,
            context_tokens=capacity.context_tokens,
            embedding_bytes=capacity.embedding_bytes,
            row_bytes=capacity.row_bytes,
            slot_bytes=capacity.slot_bytes,
        ),
        ranks=tuple(rank_from_wire(rank) for rank in message.ranks),
        loads=tuple(load.SerializeToString(deterministic=True) for load in message.loads),
        metrics_endpoint=message.metrics_endpoint,
        version=message.version,
        pid=message.pid,
        started_unix_ms=message.started_unix_ms,
    )


def rank_from_wire(message: registry_pb2.Rank) -> Rank:
    """The rank of a message."""
    agent = message.agent.SerializeToString(deterministic=True) if message.HasField("agent") else b""
    return Rank(index=message.index, device=message.device, agent=agent)
