"""What a tenant may ask for per second and at once, over all routers of the cluster.

Requests and tokens are token buckets in the shared index (Redis), one script per request. A router that cannot reach
it, or has none, takes its own share: the limit divided by the routers that live. Tokens are estimated at the door, and
the estimate is corrected when the request tells its usage, so a bucket may go into debt; who is in debt waits.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from headrace.services.router.api_keys import TenantLimits
from headrace.services.router.buckets import LocalBuckets, Rates, SharedBuckets, Taken
from headrace.services.router.tenants import Tenant
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import ResourceExhausted
from headrace.services.runtime.registry.base import Registry, Removed, Role, State
from headrace.v1 import inference_pb2

BYTES_PER_TOKEN: Final = 4
"""Of text, for the estimate at the door."""
CONCURRENT_RETRY_S: Final = 1.0


class Routers:
    """How many routers live, as the registry tells."""

    def __init__(self) -> None:
        self._living: set[str] = set()

    def __call__(self) -> int:
        return max(1, len(self._living))

    async def follow(self, registry: Registry) -> None:
        """Keep up for ever; a background task of the process."""
        async for event in registry.watch(frozenset({Role.ROUTER})):
            if isinstance(event, Removed) or event.replica.state is not State.READY:
                self._living.discard(event.replica.id)
            else:
                self._living.add(event.replica.id)


class Charge:
    """What one request has cost so far, and who pays."""

    def __init__(self, estimate: int, caller: inference_pb2.Caller) -> None:
        self.estimate = estimate
        self.caller = caller
        self.used: int | None = None

    def see(self, response: inference_pb2.GenerateResponse) -> None:
        """A response on its way to the client."""
        if response.HasField("usage"):
            self.used = response.usage.prompt_tokens + response.usage.completion_tokens


class RateExceeded(ResourceExhausted):
    """Refused by a bucket, of which `caller` tells the rest."""

    def __init__(self, message: str, caller: inference_pb2.Caller, *, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.caller = caller


class Limiter:
    """Belongs to the event loop's thread."""

    def __init__(self, shared: SharedBuckets | None, routers: Callable[[], int], clock: Clock) -> None:
        self._shared = shared
        self._routers = routers
        self._local = LocalBuckets(clock)
        self._running: Counter[bytes] = Counter()
        self._settling: set[asyncio.Task[None]] = set()
        self.refused: Counter[str] = Counter()
        """Requests refused since start, by limit: `rate` or `concurrent`."""
        self.by_share = 0
        """Decisions made by this router's share."""

    @asynccontextmanager
    async def request(self, tenant: Tenant, request: inference_pb2.GenerateRequest) -> AsyncIterator[Charge]:
        """Room for one request while the block runs. Raises ResourceExhausted with the time to come back: RateExceeded
        where a rate is why."""
        limits, key = tenant.limits, tenant.keys.tag
        charge = Charge(0 if request.resume else estimate(request.prompt), inference_pb2.Caller(tenant=tenant.name))
        if limits.max_concurrent is not None:
            if self._running[key] >= math.ceil(limits.max_concurrent / self._routers()):
                self.refused["concurrent"] += 1
                raise ResourceExhausted(
                    f"{limits.max_concurrent} requests at once are yours; come back later",
                    retry_after_s=CONCURRENT_RETRY_S,
                )
            self._running[key] += 1
        try:
            if limits.requests_per_second is None and limits.tokens_per_second is None:
                yield charge
                return
            taken, rates = await self._take(key, limits, 1, charge.estimate)
            taken.told(rates, charge.caller)
            if taken.wait_s > 0:
                self.refused["rate"] += 1
                raise RateExceeded(
                    "the rate of your requests or tokens is above what is yours; come back later",
                    charge.caller,
                    retry_after_s=math.ceil(taken.wait_s * 1000) / 1000,
                )
            try:
                yield charge
            finally:
                if charge.used is not None and not request.resume and charge.used != charge.estimate:
                    self._settle(key, limits, charge.used - charge.estimate)
        finally:
            if limits.max_concurrent is not None:
                self._running[key] -= 1
                if not self._running[key]:
                    del self._running[key]

    async def _take(
        self, key: bytes, limits: TenantLimits, requests: float, tokens: float, *, always: bool = False
    ) -> tuple[Taken, Rates]:
        """The answer, and of which bucket: the cluster's, or this router's own share."""
        if self._shared is not None:
            rates = Rates.of(limits)
            taken = await self._shared.take(key, rates, requests, tokens, always=always)
            if taken is not None:
                return taken, rates
        self.by_share += 1
        rates = Rates.of(limits, self._routers())
        return self._local.take(key, rates, requests, tokens, always=always), rates

    def _settle(self, key: bytes, limits: TenantLimits, more: int) -> None:
        """Correct the estimate, without anybody waiting for it."""

        async def settle() -> None:
            await self._take(key, limits, 0, more, always=True)

        task = asyncio.get_running_loop().create_task(settle(), name="limits")
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def close(self) -> None:
        """Corrections under way are finished."""
        await asyncio.gather(*self._settling, return_exceptions=True)
        if self._shared is not None:
            await self._shared.close()


def estimate(prompt: inference_pb2.Prompt) -> int:
    """Tokens of a prompt before anybody has read it: exact for token ids, a fourth of its bytes for text."""
    match prompt.WhichOneof("form"):
        case "tokens":
            return len(prompt.tokens.token_ids)
        case "text":
            return len(prompt.text.text) // BYTES_PER_TOKEN
        case "chat":
            parts = (part.text for message in prompt.chat.messages for part in message.content)
            return sum(map(len, parts)) // BYTES_PER_TOKEN
        case _:
            return 0
