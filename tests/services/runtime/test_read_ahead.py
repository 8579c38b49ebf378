"""What waits at a client's end of a stream that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from headrace.services.runtime.server import open_channel
from headrace.services.runtime.settings import RpcSettings
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc

PIECE = 4096
FAST_PIECES = 5000
"""Read at once, so that gRPC would find the connection fast."""
MOST_BYTES = 1 << 20
"""The stream's window, and what a server has on its way; with read-ahead it is several times that."""


class Flood(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.sent = 0

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.sent = 0
        while True:
            yield inference_pb2.GenerateResponse(tokens=common_pb2.TokensEvent(text="a" * PIECE))
            self.sent += PIECE


async def test_a_stream_that_nobody_reads_stops_soon() -> None:
    """L12: as a gateway's whose client has stopped reading."""
    flood = Flood()
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(flood, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}", RpcSettings(), read_ahead=False) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            fast = stub.Generate(inference_pb2.GenerateRequest())
            for _ in range(FAST_PIECES):
                await fast.read()
            fast.cancel()
            unread = stub.Generate(inference_pb2.GenerateRequest())
            await unread.read()
            before = -1
            while flood.sent != before:
                before = flood.sent
                assert before < MOST_BYTES
                await asyncio.sleep(0.3)
            unread.cancel()
    finally:
        await server.stop(0)
