"""What tests of drains and role changes ask of a worker process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio

from headrace.services.runtime.errors import Unavailable, from_rpc_error
from headrace.services.runtime.registry.base import Replica
from headrace.v1 import common_pb2, control_pb2, control_pb2_grpc
from tests.services.cluster import PATIENCE_S, Cluster, WorkerProcess

ROLES = {common_pb2.ROLE_PREFILL: "prefill", common_pb2.ROLE_DECODE: "decode"}
ENDED = (control_pb2.ROLE_CHANGE_STATE_DONE, control_pb2.ROLE_CHANGE_STATE_FAILED)


def control(worker: WorkerProcess) -> control_pb2_grpc.ControlServiceAsyncStub:
    return control_pb2_grpc.ControlServiceStub(worker.channel)


async def begin_change(worker: WorkerProcess, role: common_pb2.Role.ValueType, wait_ms: int = 5000) -> None:
    request = control_pb2.ChangeRoleRequest(role=role, wait_ms=wait_ms)
    await control(worker).ChangeRole(request, timeout=PATIENCE_S)


async def ended_change(worker: WorkerProcess) -> control_pb2.StatusResponse:
    """The status after a change, or after one that was given up; the same address answers."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                status = await control(worker).Status(control_pb2.StatusRequest(), timeout=PATIENCE_S)
            except grpc.aio.AioRpcError as error:
                if not isinstance(from_rpc_error(error), Unavailable):
                    raise
                status = control_pb2.StatusResponse()
            if status.ready and status.role_change.state in ENDED:
                return status
            await asyncio.sleep(0.05)


async def change(cluster: Cluster, worker: WorkerProcess, role: common_pb2.Role.ValueType) -> None:
    """Begin a change and wait for its good end; `worker` then is the new life of it."""
    await begin_change(worker, role)
    status = await ended_change(worker)
    assert status.role_change.state == control_pb2.ROLE_CHANGE_STATE_DONE, status.role_change
    await renew(cluster, worker, status)


async def renew(cluster: Cluster, worker: WorkerProcess, status: control_pb2.StatusResponse) -> Replica:
    """Wait for the registry to have the life that `status` is of; `worker` then is it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for member in await cluster.registry.members():
                if member.incarnation == status.replica.peer.incarnation:
                    assert member.endpoint == worker.replica.endpoint
                    worker.replica = member
                    return member
            await asyncio.sleep(0.05)


def resources(worker: WorkerProcess) -> dict[str, int]:
    """Resident KiB, threads, descriptors and mappings of a process."""
    pid = worker.process.pid
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "rss": int(fields["VmRSS"].split()[0]),
        "threads": int(fields["Threads"]),
        "descriptors": sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
    }
