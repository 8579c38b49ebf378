"""DecodeService: reservations, hand-overs, streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import cache, partial
from typing import Any

import grpc.aio

from headrace.engine.masks.grammars import Grammars
from headrace.engine.messages import Cancel, Commit, GetStatus, Reserve, Reserved, TransferEnded
from headrace.engine.request import EngineRequest, RequestKey
from headrace.kvcache.handle import Handle
from headrace.kvcache.landing_types import PartChecksums
from headrace.kvcache.transfer.base import TransferEngine
from headrace.kvcache.transfer.pushes import Outcome, TerminalNotice
from headrace.services.decode.attach import AttachHub
from headrace.services.decode.journal import RequestJournal, Start
from headrace.services.runtime import peers
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import FailedPrecondition, InvalidArgument, Unimplemented
from headrace.services.runtime.single_choice import single_choice
from headrace.services.worker.constraints import with_grammar
from headrace.services.worker.engine_link import EngineLink
from headrace.services.worker.events_wire import counts_from_wire, first_tokens_from_wire, reason_from_wire
from headrace.services.worker.reports import EngineReporter, load_report
from headrace.services.worker.signing import Signer
from headrace.services.worker.spec_wire import ModelFacts, content_digest, engine_request, request_key
from headrace.services.worker.transfer_wire import agent_to_wire, handle_from_wire, handle_to_wire
from headrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves one engine. Everything here belongs to the event loop's thread."""

    def __init__(
        self,
        facts: ModelFacts,
        grammars: Grammars,
        peer: common_pb2.PeerId,
        transfer: TransferEngine,
        link: EngineLink,
        hub: AttachHub,
        reporter: EngineReporter,
        clock: Clock,
        journal_tokens: int,
        signer: Signer,
    ) -> None:
        self._signer = signer
        self._journal_tokens = journal_tokens
        self._facts = facts
        self._grammars = grammars
        self._peer = peer
        self._transfer = transfer
        self._link = link
        self._hub = hub
        self._reporter = reporter
        self._clock = clock
        self._agent = common_pb2.TransferAgent()
        self.announce()
        self._reserving: set[object] = set()
        """Calls under way."""
        self.refused = 0
        """Reservations refused."""
        self.resends = 0
        """Commits answered with a resend: rows that did not match their checksum."""

    @property
    def reserving(self) -> int:
        """Reservations that are not answered: one that waits for its grammar has no journal, and is about to get rows
        that a peer may write."""
        return len(self._reserving)

    def announce(self) -> common_pb2.TransferAgent:
        """Describe the landing memory anew; called when it has changed."""
        self._agent = agent_to_wire(self._transfer.describe(), self._peer.replica_id, self._facts.wire(), self._signer)
        return self._agent

    # --- reservations ------------------------------------------------------------------------------------------

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: _Context) -> decode_pb2.ReserveResponse:
        """See decode.proto. Answered between two steps."""
        call = object()
        self._reserving.add(call)
        try:
            return await self._reserve(request)
        except BaseException:
            self.refused += 1
            raise
        finally:
            self._reserving.discard(call)

    async def _reserve(self, request: decode_pb2.ReserveRequest) -> decode_pb2.ReserveResponse:
        if request.embeddings:
            raise Unimplemented("embeddings", "decode does not compute images again; leave the field unset")
        spec = request.spec
        router = _router_of(spec)
        # No token goes out before the router has granted credit over its stream.
        bare = engine_request(spec, self._facts, self._clock.monotonic(), credit=0)
        wanted = await with_grammar(bare, self._grammars)
        image_tokens = sum(span.length for span in spec.image_spans)
        begun = self._hub.begin(
            RequestJournal(
                wanted.key,
                router,
                [Start(wanted.delivered_to(state.choice), state.received_tokens) for state in spec.choices],
                image_tokens,
                content=content_digest(spec),
                most_tokens=self._journal_tokens,
                now=self._clock.monotonic(),
            )
        )
        sender = request.sender.incarnation or None
        reserve = Reserve(wanted, sender, request.compute_here)
        asked, status = self._link.ask(reserve), self._link.ask(GetStatus())
        if begun:
            # Not in `except`: the engine may refuse after the caller has left.
            asked.add_done_callback(partial(self._refused, wanted.key))
        try:
            reserved = await asyncio.shield(asked)
        finally:
            self._reporter.refresh()
        if reserved.handle is not None:
            self._transfer.grant(reserved.handle, sender)
        return decode_pb2.ReserveResponse(
            landing=None if reserved.handle is None else self._handle(reserved.handle, wanted),
            agent=None if reserved.handle is None else self._agent,
            held_blocks=reserved.held_blocks,
            lease_ms=round(reserved.lease_s * 1000),
            load=load_report(await status),
        )

    def _refused(self, key: RequestKey, asked: asyncio.Future[Reserved]) -> None:
        """No event will come of what the engine has refused."""
        if asked.exception() is not None:
            self._hub.drop(key)

    async def Release(
        self, request: decode_pb2.DecodeServiceReleaseRequest, context: _Context
    ) -> decode_pb2.DecodeServiceReleaseResponse:
        """See decode.proto."""
        reason = reason_from_wire(request.reason, "reason")
        found = await self._link.call(Cancel(request_key(request.id), reason))
        self._reporter.refresh()
        return decode_pb2.DecodeServiceReleaseResponse(found=found)

    async def Adopt(self, request: decode_pb2.AdoptRequest, context: _Context) -> decode_pb2.AdoptResponse:
        """See decode.proto."""
        spec = request.spec
        router = _router_of(spec)
        offsets = [state.received_tokens for state in spec.choices]

        @cache
        def single(choice: int) -> bytes:
            return content_digest(single_choice(spec, choice))

        return self._hub.adopt(spec.id.request_id, content_digest(spec), offsets, router, single)

    # --- transfers ---------------------------------------------------------------------------------------------

    async def Commit(self, request: decode_pb2.CommitRequest, context: _Context) -> decode_pb2.CommitResponse:
        """See decode.proto. Every field of the handle is compared by the engine (L1)."""
        peers.require_claim(request.sender, field="sender")
        handle = self._own(request.landing)
        key = request_key(request.landing.id, "landing.id")
        journal = self._hub.journal(key)
        if journal is not None:
            journal.prefill.CopyFrom(request.report)
        committed = await self._link.call(
            Commit(
                key=key,
                handle=handle,
                checksums=tuple(
                    PartChecksums(tuple(part.rows), part.slot if part.HasField("slot") else None)
                    for part in request.checksums
                ),
                first=first_tokens_from_wire(request.first_tokens),
                counts=counts_from_wire(request.report),
                sender=request.sender.incarnation or None,
            )
        )
        self._transfer.forget(handle.transfer_id)
        if committed.resend is None:
            return decode_pb2.CommitResponse(admitted=decode_pb2.CommitAdmitted())
        self.resends += 1
        self._transfer.grant(committed.resend, request.sender.incarnation or None)
        left_s = request.landing.time_left_ms / 1000
        landing = handle_to_wire(committed.resend, self._peer.replica_id, left_s, self._signer)
        return decode_pb2.CommitResponse(resend=decode_pb2.CommitResend(landing=landing, agent=self._agent))

    async def EndTransfer(
        self, request: decode_pb2.EndTransferRequest, context: _Context
    ) -> decode_pb2.EndTransferResponse:
        """See decode.proto. However it ended, its rows will not be committed."""
        if request.outcome == decode_pb2.TRANSFER_OUTCOME_UNSPECIFIED:
            raise InvalidArgument("must say how the transfer ended", field="outcome")
        peers.require_claim(request.sender, peers.PeerRole.PREFILL, peers.PeerRole.WHOLE, field="sender")
        self._signer.check_handle(request.landing, "landing", fresh=False)
        if request.landing.receiver.incarnation == self._peer.incarnation:
            # First, so that no stream writes rows that are free.
            self._transfer.forget(request.landing.transfer_id)
            await self._link.call(TransferEnded(request.landing.transfer_id, complete=False))
            self._reporter.refresh()
        return decode_pb2.EndTransferResponse()

    def take_notices(self, notices: Sequence[TerminalNotice]) -> None:
        """Terminal notices from the wire, behind the sender's last write."""
        for notice in notices:
            self._link.post(TransferEnded(notice.transfer_id, complete=notice.outcome is Outcome.OK))
        self._reporter.refresh()

    # --- streams -----------------------------------------------------------------------------------------------

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.AttachRequest], context: _Context
    ) -> AsyncIterator[decode_pb2.AttachResponse]:
        """See decode.proto."""
        async with aclosing(self._hub.attach(request_iterator)) as responses:
            async for response in responses:
                yield response

    # --- inside ------------------------------------------------------------------------------------------------

    def _own(self, wire: common_pb2.TransferHandle) -> Handle:
        """L14: a handle of another life of this replica names memory that is gone."""
        if wire.receiver.incarnation != self._peer.incarnation:
            raise FailedPrecondition(
                "the handle is of another life of this replica; reserve again", field="landing.receiver"
            )
        return handle_from_wire(wire, "landing", self._signer)

    def _handle(self, handle: Handle, request: EngineRequest) -> common_pb2.TransferHandle:
        assert request.deadline is not None
        left_s = request.deadline - self._clock.monotonic()
        return handle_to_wire(handle, self._peer.replica_id, left_s, self._signer)


def _router_of(spec: common_pb2.RequestSpec) -> str:
    """The incarnation of the router that a request is of, which must be the caller. Raises InvalidArgument,
    PermissionDenied."""
    if not spec.router.incarnation:
        raise InvalidArgument("names no router", field="spec.router")
    peers.require_claim(spec.router, field="spec.router")
    return spec.router.incarnation
