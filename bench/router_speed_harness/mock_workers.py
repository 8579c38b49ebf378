"""A process of MockPrefill and MockDecode replicas that are members of a router's registry.

    python -m bench.router_speed_harness.mock_workers --registry HOST:PORT --model NAME --prefill 4 --decode 4

Prints `ready` and the endpoints as JSON once all are members; ends with its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys

import grpc.aio

from bench.router_speed_harness.mock_worker import MockDecode, MockEvents, MockPrefill
from headrace.services.runtime.ids import new_incarnation
from headrace.services.runtime.lifecycle import watch_parent
from headrace.services.runtime.registry.base import Capacity, Rank, Replica, Role, State
from headrace.services.runtime.registry.remote import RemoteRegistry
from headrace.services.runtime.server import server_options
from headrace.services.runtime.settings import RpcSettings
from headrace.v1 import common_pb2, decode_pb2_grpc, events_pb2_grpc, prefill_pb2_grpc

TTL_S = 10.0
BLOCK_TOKENS = 128
CAPACITY = Capacity(rows=1 << 20, slots=1 << 14, block_tokens=BLOCK_TOKENS, context_tokens=1 << 20)
FINGERPRINT = bytes(32)


async def serve(options: argparse.Namespace) -> None:
    """All replicas, until cancelled."""
    model, delay_s = options.model, options.prefill_ms / 1e3
    decodes: dict[str, MockDecode] = {}
    registry = RemoteRegistry(options.registry, RpcSettings())
    servers: list[grpc.aio.Server] = []
    endpoints: dict[str, str] = {}
    for role, count in ((Role.PREFILL, options.prefill), (Role.DECODE, options.decode)):
        for index in range(count):
            peer = common_pb2.PeerId(replica_id=f"Mock-{role.value}-{index}", incarnation=new_incarnation())
            server = grpc.aio.server(options=server_options(RpcSettings()))
            events_pb2_grpc.add_EventServiceServicer_to_server(MockEvents(), server)
            endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            if role is Role.PREFILL:
                servicer = MockPrefill(peer, delay_s, decodes if options.commit_here else None)
                prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
            else:
                decodes[endpoint] = MockDecode(peer, options.step_ms / 1e3, BLOCK_TOKENS)
                decode_pb2_grpc.add_DecodeServiceServicer_to_server(decodes[endpoint], server)
            await server.start()
            servers.append(server)
            endpoints[peer.replica_id] = endpoint
            await registry.register(mock_replica(peer, role, endpoint, model), TTL_S)
    sys.stdout.write(json.dumps({"ready": True, "endpoints": endpoints}) + "\n")
    sys.stdout.flush()
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


def mock_replica(peer: common_pb2.PeerId, role: Role, endpoint: str, model: str) -> Replica:
    """The membership entry of a mock."""
    return Replica(
        id=peer.replica_id,
        incarnation=peer.incarnation,
        role=role,
        data_centre="local",
        host=socket.gethostname(),
        endpoint=endpoint,
        state=State.READY,
        model_name=model,
        layout_fp=FINGERPRINT,
        row_fp=FINGERPRINT,
        model_fp=FINGERPRINT,
        capacity=CAPACITY,
        ranks=(Rank(0, "cpu"),),
        version="mock",
        pid=os.getpid(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=0.0, help="pause between decode steps")
    parser.add_argument("--prefill-ms", type=float, default=0.0, help="pause before a hand-over")
    parser.add_argument("--commit-here", action="store_true", help="hand over inside this process, not over gRPC")
    options = parser.parse_args()
    if not watch_parent(os.getppid(), lambda: os._exit(1)):
        sys.exit("the parent is gone")
    with asyncio.Runner() as runner:
        runner.run(serve(options))


if __name__ == "__main__":
    main()
