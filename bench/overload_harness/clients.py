"""Requests that keep slots busy, arrive at a rate, or go one at a time; and what became of each."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

import grpc.aio

from headrace.cli.ask import token_prompt
from headrace.services.runtime.errors import ResourceExhausted, from_rpc_error
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceServiceAsyncStub

PROMPT, TOKENS = 48, 32
TIMEOUT_S = 300.0
WINDOW_S = 5.0
"""Goodput is looked at in windows of so long."""
PROBE_S = 0.1
"""Between two probes of the recovery."""
MOST_RECOVERY_S = 120.0
_numbers = count()


@dataclass(frozen=True)
class Finished:
    """A request that had all its tokens."""

    first_s: float
    """To the first token."""
    tpot_s: float
    """Mean time per token after it."""
    ended: float
    """On the clock."""


@dataclass(frozen=True)
class Goodput:
    """As shares of the capacity."""

    mean: float
    least: float
    """Of the windows."""


@dataclass
class Outcomes:
    """Of one phase."""

    offered: int = 0
    finished: list[Finished] = field(default_factory=list)
    refused: list[float | None] = field(default_factory=list)
    """By RESOURCE_EXHAUSTED: the time to come back, as told."""
    failed: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    """In which requests arrived."""
    running: set[asyncio.Task[Finished | None]] = field(default_factory=set)

    async def settle(self) -> None:
        """Until all that was asked has ended."""
        await asyncio.gather(*self.running)

    def tpot_ms(self) -> float:
        """The median."""
        return 1000 * median(one.tpot_s for one in self.finished)

    def goodput(self, capacity: float) -> Goodput:
        """Of `capacity` requests a second; windows while requests arrived, but for the first, which fills the slots."""
        windows = [0] * max(1, int(self.seconds / WINDOW_S))
        for one in self.finished:
            index = int((one.ended - self.began) / WINDOW_S)
            if 0 <= index < len(windows):
                windows[index] += 1
        shares = [number / WINDOW_S / capacity for number in windows[1:] or windows]
        return Goodput(sum(shares) / len(shares), min(shares))


@asynccontextmanager
async def open_client(router: str) -> AsyncIterator[Stub]:
    """A channel of its own."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    async with grpc.aio.insecure_channel(router, options=options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def ask(stub: Stub, outcomes: Outcomes) -> Finished | None:
    """One request, of a prompt that nobody has asked before."""
    outcomes.offered += 1
    seed = next(_numbers)
    ids = random.Random(seed).choices(range(3, 200), k=PROMPT)
    request = inference_pb2.GenerateRequest(
        prompt=token_prompt(ids),
        sampling=common_pb2.SamplingParams(temperature=0.0, seed=seed),
        stop=common_pb2.StopParams(max_tokens=TOKENS, ignore_eos=True),
    )
    begun, first, tokens, whole = time.monotonic(), 0.0, 0, False
    try:
        async for event in stub.Generate(request, timeout=TIMEOUT_S):
            if event.HasField("tokens"):
                first = first or time.monotonic()
                tokens += len(event.tokens.token_ids)
            if event.HasField("finished"):
                whole = event.finished.reason == common_pb2.FINISH_REASON_LENGTH
                if not whole:
                    outcomes.failed.append(str(event.finished))
    except grpc.aio.AioRpcError as error:
        typed = from_rpc_error(error)
        if isinstance(typed, ResourceExhausted):
            outcomes.refused.append(typed.retry_after_s)
        else:
            outcomes.failed.append(repr(typed))
        return None
    if not whole:
        return None
    ended = time.monotonic()
    finished = Finished(first - begun, (ended - first) / max(1, tokens - 1), ended)
    outcomes.finished.append(finished)
    return finished


async def one_at_a_time(stub: Stub, number: int) -> float:
    """Median time to the first token, in seconds, with nothing else there. Raises RuntimeError when one fails."""
    outcomes = Outcomes()
    found = [await ask(stub, outcomes) for _ in range(number + 1)]  # the first warms up
    good = [one.first_s for one in found[1:] if one is not None]
    if not good:
        raise RuntimeError(f"an idle cluster answers nothing: {outcomes.failed}")
    return median(good)


async def keep_busy(stub: Stub, clients: int, seconds: float) -> Outcomes:
    """So many clients, each asking again as soon as it is answered."""
    outcomes = Outcomes()
    until = outcomes.began + seconds

    async def client() -> None:
        while time.monotonic() < until:
            await ask(stub, outcomes)

    await asyncio.gather(*(client() for _ in range(clients)))
    outcomes.seconds = time.monotonic() - outcomes.began
    return outcomes


async def offer(stub: Stub, rate: float, seconds: float, seed: int = 0) -> Outcomes:
    """Requests arrive at `rate` a second, whatever becomes of those before; returns when the last has arrived. Those
    that run then are noted as they end, until `Outcomes.settle`."""
    outcomes, gaps = Outcomes(), random.Random(seed)
    tasks = outcomes.running
    arrival = outcomes.began
    while (arrival := arrival + gaps.expovariate(rate)) < outcomes.began + seconds:
        await asyncio.sleep(arrival - time.monotonic())
        task = asyncio.create_task(ask(stub, outcomes))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    outcomes.seconds = seconds
    return outcomes


async def recovery(stub: Stub, overloaded: Outcomes, fast_s: float) -> float:
    """Seconds from the last arrival until a request that comes then has its first token within `fast_s`."""
    while True:
        begun = time.monotonic()
        since = begun - overloaded.began - overloaded.seconds
        found = await ask(stub, Outcomes())
        if (found is not None and found.first_s <= fast_s) or since > MOST_RECOVERY_S:
            return max(0.0, since)
        await asyncio.sleep(PROBE_S)
