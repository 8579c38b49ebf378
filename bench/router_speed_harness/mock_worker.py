"""A worker without an engine: MockPrefill hands over at once, MockDecode emits token 7 for every request, once a step.

They speak the whole protocol (registry, Reserve, Run, Attach with credits, renewals and cancels), so that a real router
routes over them; no KV exists and nothing is computed. What is measured over them is the router's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from headrace.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    events_pb2,
    events_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

_Context = grpc.aio.ServicerContext[Any, Any]
TOKEN = 7
LEASE_MS = 5000
WORD_S = 0.1
"""A router that has heard something so recently needs no word of its own; others are answered."""
Key = tuple[str, int]


@dataclass(eq=False)
class _Running:
    spec: common_pb2.RequestSpec
    committed: bool = False
    credit: int = 0
    sent: int = 0
    cancelled: common_pb2.FinishReason.ValueType | None = None

    @property
    def ready(self) -> bool:
        return self.committed and (self.cancelled is not None or self.sent < self.credit)


@dataclass(eq=False)
class MockDecode(decode_pb2_grpc.DecodeServiceServicer):
    """`step_s`: pause between steps; 0 for none."""

    peer: common_pb2.PeerId
    step_s: float = 0.0
    block_tokens: int = 128
    steps: int = 0
    _requests: dict[Key, _Running] = field(default_factory=dict)
    _news: dict[str, asyncio.Event] = field(default_factory=dict)
    """Of each attached router, by its incarnation."""

    @property
    def live(self) -> int:
        """Requests that hold room (L11: zero at idle)."""
        return len(self._requests)

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: _Context) -> decode_pb2.ReserveResponse:
        spec = request.spec
        self._requests[_key(spec.id)] = _Running(spec)
        handle = common_pb2.TransferHandle(transfer_id=secrets.token_hex(8), receiver=self.peer, id=spec.id)
        return decode_pb2.ReserveResponse(
            landing=handle, agent=common_pb2.TransferAgent(owner=self.peer), lease_ms=LEASE_MS, load=self._load()
        )

    async def Release(
        self, request: decode_pb2.DecodeServiceReleaseRequest, context: _Context
    ) -> decode_pb2.DecodeServiceReleaseResponse:
        found = self._requests.pop(_key(request.id), None) is not None
        return decode_pb2.DecodeServiceReleaseResponse(found=found)

    async def EndTransfer(
        self, request: decode_pb2.EndTransferRequest, context: _Context
    ) -> decode_pb2.EndTransferResponse:
        return decode_pb2.EndTransferResponse()

    async def Commit(self, request: decode_pb2.CommitRequest, context: _Context) -> decode_pb2.CommitResponse:
        """As prefill calls it; there is nothing to verify. The first token counts as drawn."""
        if not self.commit(request.landing.id):
            await context.abort(grpc.StatusCode.ABORTED, "no such reservation")
        return decode_pb2.CommitResponse(admitted=decode_pb2.CommitAdmitted())

    def commit(self, attempt: common_pb2.AttemptId) -> bool:
        """Whether there is such a reservation; it runs from now on."""
        running = self._requests.get(_key(attempt))
        if running is None:
            return False
        running.committed = True
        self._wake(running.spec.router.incarnation)
        return True

    async def Attach(
        self, requests: AsyncIterator[decode_pb2.AttachRequest], context: _Context
    ) -> AsyncIterator[decode_pb2.AttachResponse]:
        """One stream per router, with the events of its requests."""
        first = await anext(aiter(requests))
        router = first.router.incarnation
        news = self._news[router] = asyncio.Event()
        loop = asyncio.get_running_loop()
        reader = asyncio.create_task(self._read(requests, news))
        try:
            yield decode_pb2.AttachResponse(decode=self.peer, load=self._load())
            said = loop.time()
            while not reader.done():
                news.clear()
                events = self._step(router)
                if events or loop.time() - said >= WORD_S:
                    said = loop.time()
                    yield decode_pb2.AttachResponse(step=self.steps, requests=events, load=self._load())
                    await asyncio.sleep(self.step_s)
                else:
                    await news.wait()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _wake(self, router: str) -> None:
        if router in self._news:
            self._news[router].set()

    async def _read(self, requests: AsyncIterator[decode_pb2.AttachRequest], news: asyncio.Event) -> None:
        async for message in requests:
            for attached in message.requests:
                running = self._requests.get(_key(attached.id))
                if running is not None:
                    running.credit = max(running.credit, attached.credit_tokens)
            for cancel in message.cancels:
                running = self._requests.get(_key(cancel.id))
                if running is not None:
                    running.cancelled = cancel.reason
                    running.committed = True
            news.set()

    def _step(self, router: str) -> list[decode_pb2.RequestEvents]:
        """One token for every request of the router that may have one."""
        ready = [
            (key, running)
            for key, running in self._requests.items()
            if running.ready and running.spec.router.incarnation == router
        ]
        self.steps += bool(ready)
        return [self._advance(key, running) for key, running in ready]

    def _advance(self, key: Key, running: _Running) -> decode_pb2.RequestEvents:
        spec = running.spec
        events = decode_pb2.RequestEvents(id=spec.id)
        reason = running.cancelled
        if reason is None:
            events.tokens.add(choice=0, offset=running.sent, token_ids=(TOKEN,), text="x")
            running.sent += 1
            if running.sent >= spec.stop.max_tokens:
                reason = common_pb2.FINISH_REASON_LENGTH
        if reason is not None:
            events.finished.add(choice=0, reason=reason, completion_tokens=running.sent)
            events.report.usage.prompt_tokens = spec.prompt_tokens
            events.report.usage.computed_tokens = spec.prompt_tokens
            events.report.usage.completion_tokens = running.sent
            del self._requests[key]
        return events

    def _load(self) -> common_pb2.LoadReport:
        rows = sum(-(-(one.spec.prompt_tokens + one.sent + 1) // self.block_tokens) for one in self._requests.values())
        return common_pb2.LoadReport(
            running_requests=len(self._requests), rows_used=rows, slots_used=len(self._requests), step=self.steps
        )


class MockEvents(events_pb2_grpc.EventServiceServicer):
    """Says that there is nothing to follow: a mock holds no prefixes."""

    async def Watch(
        self, request: events_pb2.EventServiceWatchRequest, context: _Context
    ) -> AsyncIterator[events_pb2.EventServiceWatchResponse]:
        await context.abort(grpc.StatusCode.NOT_FOUND, "a mock has no cache events")
        yield events_pb2.EventServiceWatchResponse()


class MockPrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Hands over through the decode's own Commit, over gRPC as a real one, or by a call where the decode is in the same
    process and a measurement is not about workers; computes nothing."""

    def __init__(
        self, peer: common_pb2.PeerId, delay_s: float = 0.0, decodes: Mapping[str, MockDecode] | None = None
    ) -> None:
        """`decodes`: by endpoint, those that it may call."""
        self._peer = peer
        self._delay_s = delay_s
        self._decodes = decodes or {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.runs = 0

    async def Run(self, request: prefill_pb2.RunRequest, context: _Context) -> AsyncIterator[prefill_pb2.RunResponse]:
        await context.send_initial_metadata(())
        self.runs += 1
        yield prefill_pb2.RunResponse(accepted=prefill_pb2.Accepted())
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        report = prefill_pb2.PrefillReport(computed_tokens=request.spec.prompt_tokens, transport="mock")
        decode = self._decodes.get(request.target.endpoint)
        if decode is None:
            commit = decode_pb2.CommitRequest(landing=request.target.landing, sender=self._peer, report=report)
            await decode_pb2_grpc.DecodeServiceStub(self._channel(request.target.endpoint)).Commit(commit)
        else:
            decode.commit(request.target.landing.id)
        yield prefill_pb2.RunResponse(handed_over=prefill_pb2.HandedOver(report=report))

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = grpc.aio.insecure_channel(endpoint)
        return channel

    async def Cancel(
        self, request: prefill_pb2.PrefillServiceCancelRequest, context: _Context
    ) -> prefill_pb2.PrefillServiceCancelResponse:
        return prefill_pb2.PrefillServiceCancelResponse(found=False)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


def _key(attempt: common_pb2.AttemptId) -> Key:
    return attempt.request_id, attempt.attempt
