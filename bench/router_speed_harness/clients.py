"""Clients of a router and of workers themselves, on asyncio; what they saw."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter

import grpc.aio

from headrace.services.runtime.server import open_channel
from headrace.services.runtime.settings import RpcSettings
from headrace.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

TIMEOUT_S = 120.0
RENEW_S = 1.0
ENOUGH = 1 << 30


@dataclass
class Seen:
    """One request as its client saw it; times in perf_counter seconds."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    """One per token event."""
    tokens: int = 0
    ended: float = 0.0
    replicas: dict[int, str] = field(default_factory=dict)
    """Role → replica, where the request asked for a report."""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gap_s(self) -> float:
        """Mean time between token events after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / (len(self.arrivals) - 1)


class FrontDoor:
    """Requests through a router."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def send(self, prompt: Sequence[int], max_tokens: int, *, report: bool = False) -> Seen:
        """One request to its end. Raises RuntimeError when it fails."""
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=prompt)),
            sampling=common_pb2.SamplingParams(temperature=0.0, seed=1),
            stop=common_pb2.StopParams(max_tokens=max_tokens, ignore_eos=True),
            report=report,
        )
        seen = Seen(perf_counter())
        async for event in self._stub.Generate(request, timeout=TIMEOUT_S):
            kind = event.WhichOneof("event")
            if kind == "tokens":
                seen.arrivals.append(perf_counter())
                seen.tokens += len(event.tokens.token_ids)
            elif kind == "finished":
                seen.ended = perf_counter()
                if event.finished.HasField("error"):
                    seen.error = event.finished.error.message
            elif kind == "report":
                seen.replicas = {one.role: one.peer.replica_id for one in event.report.replicas}
        return seen


class StraightToWorkers:
    """The same request by the shortest way: Reserve, Run, and one Attach stream that stays open, as the router's does.
    Nothing is validated, chosen, queued or accounted for."""

    def __init__(
        self, prefill: grpc.aio.Channel, decode: grpc.aio.Channel, model: inference_pb2.Model, keep_tokens: int = 0
    ) -> None:
        """`keep_tokens`: K of bounded replay, for models with a window."""
        self._run = prefill_pb2_grpc.PrefillServiceStub(prefill).Run
        self._decode = decode_pb2_grpc.DecodeServiceStub(decode)
        self._model = model
        self._keep_tokens = keep_tokens
        self._router = common_pb2.PeerId(replica_id="bench", incarnation=secrets.token_hex(16))
        self._feeds: dict[str, asyncio.Queue[decode_pb2.RequestEvents | None]] = {}
        self._live: dict[str, common_pb2.AttemptId] = {}
        self._wake = asyncio.Event()
        self._open = asyncio.Event()
        self._failure: BaseException | None = None

    @asynccontextmanager
    async def attached(self) -> AsyncIterator[None]:
        """The stream, for the block."""
        task = asyncio.create_task(self._follow())
        task.add_done_callback(self._broken)
        try:
            await asyncio.wait_for(self._open.wait(), TIMEOUT_S)
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _broken(self, followed: asyncio.Task[None]) -> None:
        """Whoever waits for an event of a stream that broke hears of it."""
        self._failure = None if followed.cancelled() else followed.exception()
        self._open.set()
        for feed in self._feeds.values():
            feed.put_nowait(None)

    async def _follow(self) -> None:
        async for response in self._decode.Attach(self._messages()):
            self._open.set()
            for events in response.requests:
                feed = self._feeds.get(events.id.request_id)
                if feed is not None:
                    feed.put_nowait(events)

    async def _messages(self) -> AsyncIterator[decode_pb2.AttachRequest]:
        yield decode_pb2.AttachRequest(router=self._router)
        while True:
            self._wake.clear()
            yield decode_pb2.AttachRequest(
                requests=[
                    decode_pb2.AttachedRequest(id=attempt, credit_tokens=ENOUGH) for attempt in self._live.values()
                ]
            )
            try:
                await asyncio.wait_for(self._wake.wait(), RENEW_S)
            except TimeoutError:
                continue

    async def send(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        prefill: common_pb2.PeerId,
        decode: common_pb2.PeerId,
        endpoint: str,
    ) -> Seen:
        """One request to its end. `endpoint`: decode's, for prefill."""
        spec = common_pb2.RequestSpec(
            id=common_pb2.AttemptId(request_id=secrets.token_hex(16), attempt=1),
            model=self._model.identity,
            token_ids=prompt,
            prompt_tokens=len(prompt),
            keep_tokens=self._keep_tokens,
            replay_mode=common_pb2.REPLAY_MODE_COMPACT,
            root_key=bytes(32),
            sampling=common_pb2.SamplingParams(temperature=0.0, top_p=1.0, seed=1, n=1),
            stop=common_pb2.StopParams(max_tokens=max_tokens, ignore_eos=True),
            choices=[common_pb2.ChoiceState(choice=0, seed=1)],
            time_left_ms=round(TIMEOUT_S * 1000),
            router=self._router,
        )
        name = spec.id.request_id
        feed = self._feeds[name] = asyncio.Queue()
        seen = Seen(perf_counter())
        reserved = await self._decode.Reserve(decode_pb2.ReserveRequest(spec=spec, sender=prefill), timeout=TIMEOUT_S)
        self._live[name] = spec.id
        self._wake.set()
        target = prefill_pb2.DecodeTarget(
            peer=decode,
            endpoint=endpoint,
            agent=reserved.agent,
            landing=reserved.landing,
            held_blocks=reserved.held_blocks,
        )
        call = self._run(prefill_pb2.RunRequest(spec=spec, target=target), timeout=TIMEOUT_S)
        run = asyncio.create_task(_last(call))
        run.add_done_callback(lambda ended: _tell_failure(ended, feed))
        try:
            while True:
                events = await asyncio.wait_for(feed.get(), TIMEOUT_S)
                if events is None:
                    if self._failure is not None:
                        raise self._failure
                    break  # the run failed, which is raised below
                for tokens in events.tokens:
                    seen.arrivals.append(perf_counter())
                    seen.tokens += len(tokens.token_ids)
                if events.finished:
                    seen.ended = perf_counter()
                if events.HasField("report"):
                    break
            await run
        finally:
            run.cancel()
            del self._feeds[name], self._live[name]
        return seen


def _tell_failure(run: asyncio.Task[None], feed: asyncio.Queue[decode_pb2.RequestEvents | None]) -> None:
    if not run.cancelled() and run.exception() is not None:
        feed.put_nowait(None)


async def _last(call: AsyncIterable[prefill_pb2.RunResponse]) -> None:
    async for response in call:
        if response.HasField("failed"):
            raise RuntimeError(f"prefill failed: {response.failed.error.message}")


@asynccontextmanager
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel for the block."""
    opened = open_channel(address, RpcSettings())
    try:
        yield opened
    finally:
        await opened.close()


async def closed_loop(
    door: FrontDoor,
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    max_tokens: int,
    told: Callable[[], None] = lambda: None,
) -> list[Seen]:
    """Send every prompt, `concurrency` in flight."""
    upcoming = iter(prompts)
    seen: list[Seen] = []

    async def one_client() -> None:
        for prompt in upcoming:
            seen.append(await door.send(prompt, max_tokens))
            told()

    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return seen
