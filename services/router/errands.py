"""What an attempt leaves to be done after it: giving back what a worker promised, so that nothing waits for a word that
nobody will say (L7, L10). Each errand is bounded in time and ends by itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc.aio

from headrace.services.runtime import logs
from headrace.services.runtime.errors import Unavailable, closed_is_unavailable, from_rpc_error, typed
from headrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

if TYPE_CHECKING:
    from headrace.services.router.workers import Workers

_log = logs.get(__name__)
RELEASE_TIMEOUT_S = 2.0
ARRIVE_TIMEOUT_S = 10.0
"""Longest wait for prefill to have taken a run that is to be closed, and for one answer of a recall."""
RECALL_S = 300.0
"""How long a prefill that does not answer is asked to take a run back; its rows wait in quarantine until then."""
RECALL_TRIES = 5
RECALL_PAUSE_S = 0.5


async def release(stub: decode_pb2_grpc.DecodeServiceAsyncStub, attempt: common_pb2.AttemptId) -> None:
    """L10: a reservation whose answer was lost is given back; if this fails too, its lease ends it."""
    try:
        with closed_is_unavailable("decode"):
            await stub.Release(
                decode_pb2.DecodeServiceReleaseRequest(id=attempt, reason=common_pb2.FINISH_REASON_CANCELLED),
                timeout=RELEASE_TIMEOUT_S,
            )
    except (Unavailable, grpc.aio.AioRpcError) as error:
        _log.info("a reservation is left to expire", error=str(typed(error)))


async def leave(call: grpc.aio.UnaryStreamCall[Any, Any], run: asyncio.Task[None]) -> bool:
    """Close a run, but not before it has arrived: from then on prefill owns the grant and tells decode, however the run
    ends, that nothing more will be written. A call that was closed on its way would leave decode waiting for that word,
    and the landing rows in quarantine, for ever (L7). False: it may not have arrived all the same, and is to be
    recalled."""
    try:
        with closed_is_unavailable("prefill"):
            async with asyncio.timeout(ARRIVE_TIMEOUT_S):
                await call.initial_metadata()
        return True
    except (TimeoutError, Unavailable, grpc.aio.AioRpcError) as error:
        _log.info("a run was closed that may not have arrived", error=str(error))
        return False
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def recall(workers: Workers, endpoint: str, attempt: common_pb2.AttemptId) -> bool:
    """Ask prefill to take back a run whose call broke. True: it does not run it, and now never will.

    A channel of its own: the router's was closed when the process left the registry, which a frozen one does too. Asked
    until it answers, for RECALL_S at most; a refused connection is asked again only briefly. Raises AioRpcError.
    """
    request = prefill_pb2.PrefillServiceCancelRequest(id=attempt)
    loop = asyncio.get_running_loop()
    until = loop.time() + RECALL_S
    refused = 0
    async with workers.open_channel(endpoint) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        while True:
            try:
                return not (await stub.Cancel(request, timeout=ARRIVE_TIMEOUT_S)).found
            except grpc.aio.AioRpcError as error:
                refused += isinstance(from_rpc_error(error), Unavailable)
                if workers.closing or refused >= RECALL_TRIES or loop.time() >= until:
                    raise
            await asyncio.sleep(RECALL_PAUSE_S)


async def give_back(
    stub: decode_pb2_grpc.DecodeServiceAsyncStub,
    asked: asyncio.Future[decode_pb2.ReserveResponse],
    attempt: common_pb2.AttemptId,
    sender: common_pb2.PeerId,
) -> None:
    """L10: the client left while decode was asked. Nobody was given the grant, so its landing rows are quiet."""
    try:
        with closed_is_unavailable("decode"):
            response = await asked
            await stub.EndTransfer(
                decode_pb2.EndTransferRequest(
                    landing=response.landing, sender=sender, outcome=decode_pb2.TRANSFER_OUTCOME_QUIET
                ),
                timeout=RELEASE_TIMEOUT_S,
            )
    except (Unavailable, grpc.aio.AioRpcError) as error:
        _log.info("a grant was not given back", error=str(typed(error)))
    await release(stub, attempt)
