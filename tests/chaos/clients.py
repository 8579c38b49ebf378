"""Clients with known right answers. One that loses its stream resumes as docs/reliability.md says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from bench.two_routers_harness.clients import OPTIONS as SLOW_OPTIONS
from headrace.services.runtime.errors import (
    METADATA_KEY,
    DeadlineExceeded,
    HeadraceError,
    ResourceExhausted,
    Unavailable,
    from_rpc_error,
)
from headrace.services.runtime.server import open_channel
from headrace.services.runtime.settings import RpcSettings
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.chaos.checker import Answer, Books, Outcome, Watch
from tests.chaos.schedule import Ask, Manner, ask

PATIENCE_S = 240.0
"""Deadline of a request that has no closer one, and how long its client goes on trying."""
SILENCE_S = 25.0
"""A stream that says nothing for so long is given up and resumed elsewhere."""
MOST_PAUSES = 3


@dataclass
class Trace:
    """One request, for the figures."""

    ask: Ask
    opened: float
    watch: Watch
    arrivals: list[float] = field(default_factory=list)
    """Moments at which tokens came."""
    closed: float = 0.0
    outcome: Outcome | None = None
    reason: str = ""


class Lost(Exception):
    """The stream is lost and may be resumed."""


class Clients:
    """All clients of a round."""

    def __init__(
        self,
        seed: int,
        routers: Sequence[tuple[str, str]],
        templates: Sequence[inference_pb2.GenerateRequest],
        known: Sequence[Answer],
        books: Books,
    ) -> None:
        """`routers`: (name, address)."""
        self._seed = seed
        self._routers = routers
        self._templates = templates
        self._known = known
        self._books = books
        self.traces: list[Trace] = []
        self.breaks: Counter[str] = Counter()
        """How streams were lost."""
        self._through: Counter[str] = Counter()

    def through(self, router: str) -> int:
        """Requests that are open through a router."""
        return self._through[router]

    async def run(self, count: int, going: Callable[[], bool], first: int = 0) -> None:
        """`count` clients that ask one request after another while it is `going`."""
        await asyncio.gather(*(self._client(first + index, going) for index in range(count)))

    async def _client(self, index: int, going: Callable[[], bool]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(open_channel(address, RpcSettings())) for _, address in self._routers
            ]
            number = 0
            while going():
                wanted = ask(self._seed, index, number, len(self._templates))
                number += 1
                trace = Trace(
                    wanted,
                    time.monotonic(),
                    Watch(max(1, self._templates[wanted.template].sampling.n), self._known[wanted.template]),
                )
                self.traces.append(trace)
                self._books.opened(wanted.name)
                trace.outcome, trace.reason = await self._one(trace, channels)
                trace.closed = time.monotonic()
                self._books.closed(wanted.name, trace.outcome)
                if trace.outcome is Outcome.REFUSED:
                    await asyncio.sleep(0.5)

    async def _one(self, trace: Trace, channels: Sequence[grpc.aio.Channel]) -> tuple[Outcome, str]:
        wanted, watch = trace.ask, trace.watch
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._templates[wanted.template])
        request.request_id = wanted.name
        if wanted.manner is Manner.DEADLINE:
            request.timeout_ms = round(wanted.seconds * 1000)
        router, until, reason = wanted.router % len(channels), time.monotonic() + PATIENCE_S, ""
        leave = wanted.manner in (Manner.CANCEL, Manner.RESUME)
        while time.monotonic() < until:
            name, address = self._routers[router]
            self._through[name] += 1
            try:
                async with contextlib.AsyncExitStack() as stack:
                    channel = channels[router]
                    if wanted.manner is Manner.SLOW:
                        channel = await stack.enter_async_context(
                            grpc.aio.insecure_channel(address, options=SLOW_OPTIONS)
                        )
                    stub = inference_pb2_grpc.InferenceServiceStub(channel)
                    call = stub.Generate(request, timeout=max(1.0, until - time.monotonic()))
                    left = await self._read(call, trace, leave=leave)
            except Lost as lost:
                reason = str(lost)
            except HeadraceError as error:
                return self._refusal(trace, error)
            else:
                if not left:
                    return self._end(trace)
                if wanted.manner is Manner.CANCEL:
                    return Outcome.CANCELLED, ""
                leave = False
            finally:
                self._through[name] -= 1
                if watch.accepted:
                    self._books.accepted(wanted.name)
            watch.resumed()
            del request.resume[:]
            request.resume.extend(watch.resume_points())
            router = (router + 1) % len(channels)
            await asyncio.sleep(0.1)
        return Outcome.FAILED, f"no router took it in {PATIENCE_S:.0f} s: {reason}"

    async def _read(self, call: Any, trace: Trace, *, leave: bool) -> bool:
        """Take the stream's events; whether the client left it. Raises Lost, or what the router says."""
        wanted, watch, pauses = trace.ask, trace.watch, 0
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    event = await call.read()
                if event is grpc.aio.EOF:
                    code = await call.code()
                    if code is not grpc.StatusCode.OK:
                        raise Lost(f"ended with {code.name}")
                    return False
                watch.take(event)
                if not event.HasField("tokens"):
                    continue
                trace.arrivals.append(time.monotonic())
                if leave and watch.seen.count >= wanted.after_tokens:
                    return True
                slow = wanted.manner is Manner.SLOW and pauses < MOST_PAUSES
                if slow and watch.seen.count >= wanted.after_tokens * (pauses + 1):
                    pauses += 1
                    await asyncio.sleep(wanted.seconds)
        except TimeoutError:
            self.breaks["silence"] += 1
            raise Lost(f"{SILENCE_S:.0f} s of silence") from None
        except grpc.aio.AioRpcError as failed:
            error = from_rpc_error(failed)
            typed = any(key == METADATA_KEY for key, _ in failed.trailing_metadata() or ())
            if typed and not isinstance(error, Unavailable):
                raise error from failed
            if failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise error from failed
            self.breaks[f"{'typed ' if typed else ''}{failed.code().name}"] += 1
            raise Lost(f"{failed.code().name}: {failed.details()}") from failed
        finally:
            call.cancel()

    def _refusal(self, trace: Trace, error: HeadraceError) -> tuple[Outcome, str]:
        """The router ended the call with a typed error."""
        if isinstance(error, ResourceExhausted) and not trace.watch.accepted:
            return Outcome.REFUSED, str(error)
        if isinstance(error, DeadlineExceeded) and trace.ask.manner is Manner.DEADLINE:
            return Outcome.DEADLINE, ""
        return Outcome.FAILED, f"{type(error).__name__}: {error}"

    def _end(self, trace: Trace) -> tuple[Outcome, str]:
        """The stream came to its end."""
        watch = trace.watch
        reasons = watch.reasons
        if common_pb2.FINISH_REASON_DEADLINE in reasons and trace.ask.manner is Manner.DEADLINE:
            return Outcome.DEADLINE, ""
        if watch.errors or reasons & {
            common_pb2.FINISH_REASON_ERROR,
            common_pb2.FINISH_REASON_CANCELLED,
            common_pb2.FINISH_REASON_DEADLINE,
        }:
            told = "; ".join(f"{common_pb2.ErrorCode.Name(error.code)} {error.message}" for error in watch.errors)
            return Outcome.FAILED, told or f"ended with {sorted(reasons)}"
        watch.check_end()
        return Outcome.FINISHED, ""
