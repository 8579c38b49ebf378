"""What answers for the worker that is not there: it runs nothing and says so.

A router may choose a phantom that has just joined, and decode grants it rows. Without a word from it they would stay in
quarantine for as long as the process lives whose identity it shows (L7), as it must be; but a drain waits for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from headrace.cli.certificates import CertificateFiles
from headrace.services.runtime.server import server_options
from headrace.services.runtime.settings import RpcSettings
from headrace.v1 import prefill_pb2, prefill_pb2_grpc


class Nothing(prefill_pb2_grpc.PrefillServiceServicer):
    """Takes no run, and knows none."""

    async def Run(
        self, request: prefill_pb2.RunRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[prefill_pb2.RunResponse]:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "nobody is here")
        yield prefill_pb2.RunResponse()

    async def Cancel(
        self, request: prefill_pb2.PrefillServiceCancelRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> prefill_pb2.PrefillServiceCancelResponse:
        return prefill_pb2.PrefillServiceCancelResponse(found=False)


async def nobody(files: CertificateFiles) -> tuple[grpc.aio.Server, str]:
    """A server that runs, and its address; with mutual TLS under the phantom's certificate."""
    server = grpc.aio.server(options=server_options(RpcSettings()))
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(Nothing(), server)
    pair = (files.key.read_bytes(), files.cert.read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair], files.ca.read_bytes(), True))
    await server.start()
    return server, f"127.0.0.1:{port}"
