"""The hand-over to decode: commit, resend what did not match, commit again (L1)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc.aio

from headrace.engine.messages import PrefillDone
from headrace.kvcache.transfer.base import TransferEngine
from headrace.services.prefill.embeddings import Fetched
from headrace.services.prefill.target import HandOverTarget
from headrace.services.runtime.errors import Corrupt, HeadraceError, Unavailable, from_rpc_error
from headrace.services.runtime.intercept import request_metadata
from headrace.services.worker.channels import Channels
from headrace.services.worker.events_wire import TokenBytes, first_tokens_to_wire, microseconds
from headrace.services.worker.signing import Signer
from headrace.services.worker.tier.preload import Preloaded
from headrace.services.worker.transfer_wire import agent_from_wire, handle_from_wire, handle_to_wire
from headrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2

RETRY_S = 0.1


class CommitRefused(HeadraceError):
    """Decode refused or is gone: a new reservation is needed."""

    def __init__(self, cause: HeadraceError) -> None:
        super().__init__(cause.message)
        self.cause = cause


class Committer:
    """What every commit of one run has in common."""

    def __init__(
        self,
        target: prefill_pb2.DecodeTarget,
        sender: common_pb2.PeerId,
        channels: Channels,
        transfer: TransferEngine,
        token_bytes: TokenBytes,
        *,
        retries: int,
        resends: int,
        loaded: Preloaded,
        on_resent: Callable[[], None],
        signer: Signer,
    ) -> None:
        """`loaded`: what came from the cache tier for this run."""
        self._target = target
        self._sender = sender
        self._channels = channels
        self._transfer = transfer
        self._token_bytes = token_bytes
        self._retries = retries
        self._resends = resends
        self._loaded = loaded
        self._on_resent = on_resent
        self._signer = signer

    async def commit(
        self, target: HandOverTarget, done: PrefillDone, fetched: Fetched, timeout_s: float
    ) -> prefill_pb2.PrefillReport:
        """Land everything, commit until decode has admitted. The report as decode got it.

        Raises TransferError, CommitRefused, Corrupt when rows do not match however often they are sent.
        """
        deadline = time.monotonic() + timeout_s
        async with self._channels.use(self._target.endpoint) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            for resends_left in range(self._resends, -1, -1):
                await target.settle()
                report = make_report(target, done, fetched, self._loaded)
                request = decode_pb2.CommitRequest(
                    landing=handle_to_wire(
                        target.handle, self._target.peer.replica_id, deadline - time.monotonic(), self._signer
                    ),
                    sender=self._sender,
                    checksums=target.checksums(),
                    first_tokens=first_tokens_to_wire(done.first, self._token_bytes),
                    report=report,
                )
                response = await self._call(stub, request, deadline)
                if response.HasField("admitted"):
                    return report
                self._on_resent()
                resend = response.resend
                target.adopt(handle_from_wire(resend.landing, "resend.landing", self._signer, fresh=True))
                if resends_left:
                    agent = agent_from_wire(resend.agent, "resend.agent", self._signer)
                    await asyncio.wrap_future(self._transfer.connect(agent))
                    target.push_again(max(0.001, deadline - time.monotonic()))
        raise CommitRefused(Corrupt(f"rows did not match their checksums {self._resends + 1} times; start anew"))

    async def _call(
        self, stub: decode_pb2_grpc.DecodeServiceAsyncStub, request: decode_pb2.CommitRequest, deadline: float
    ) -> decode_pb2.CommitResponse:
        """One commit; a lost answer is asked for again, as repeating a commit changes nothing."""
        for attempt in range(self._retries + 1):
            try:
                left = max(0.001, deadline - time.monotonic())
                return await stub.Commit(request, timeout=left, metadata=request_metadata())
            except grpc.aio.AioRpcError as failed:
                error = from_rpc_error(failed)
                if not isinstance(error, Unavailable) or attempt == self._retries:
                    raise CommitRefused(error) from failed
                await asyncio.sleep(RETRY_S)
        raise AssertionError("the loop returns or raises")


def make_report(
    target: HandOverTarget, done: PrefillDone, fetched: Fetched, loaded: Preloaded
) -> prefill_pb2.PrefillReport:
    """Origins of the prompt's tokens and costs so far (L27)."""
    return prefill_pb2.PrefillReport(
        cached_tokens=done.counts.cached,
        loaded_tokens=done.counts.loaded,
        computed_tokens=done.counts.computed,
        recomputed_tokens=done.counts.recomputed,
        queue_us=microseconds(done.timings.wait_s),
        compute_us=microseconds(done.timings.work_s),
        encode_us=microseconds(fetched.seconds),
        kv_bytes=target.sent.total(),
        resent_bytes=target.resent_bytes,
        embedding_bytes=fetched.nbytes,
        loaded_bytes=loaded.nbytes,
        load_us=microseconds(loaded.seconds) if loaded.nbytes else 0,
        transport="+".join(sorted(target.sent)),
    )
