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
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from headrace.kvcache.index.base import IndexUnavailable
from headrace.kvcache.index.breaker import CircuitBreaker
from headrace.kvcache.index.redis_calls import Command, RedisCalls
from headrace.services.router.api_keys import TenantLimits
from headrace.services.router.tenants import Tenant
from headrace.services.runtime import logs
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import ResourceExhausted
from headrace.services.runtime.registry.base import Registry, Removed, Role, State
from headrace.v1 import inference_pb2

BURST_S: Final = 10.0
"""A bucket holds what its rate gives in so many seconds, and one request at least."""
BYTES_PER_TOKEN: Final = 4
"""Of text, for the estimate at the door."""
CONCURRENT_RETRY_S: Final = 1.0
THREADS: Final = 2
AT_ONCE: Final = 64
"""Questions to Redis under way; beyond them a router takes its share, as when Redis is slow (L12)."""
MAX_LOCAL: Final = 16_384
"""Buckets remembered here; the fullest are forgotten, which is what they would become."""
_log = logs.get(__name__)

TAKE: Final = """
local rr, rb, tr, tb = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local requests, tokens, always = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7] == '1'
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local old = redis.call('HMGET', KEYS[1], 'r', 't', 'at')
local past = math.max(0, now - (tonumber(old[3]) or now))
local r = math.min(rb, (tonumber(old[1]) or rb) + past * rr)
local t = math.min(tb, (tonumber(old[2]) or tb) + past * tr)
local wait = 0
if not always then
  if rr > 0 and r < requests then wait = (requests - r) / rr end
  if tr > 0 and t <= 0 then wait = math.max(wait, (1 - t) / tr) end
end
if wait == 0 then r = r - requests t = t - tokens end
local full = 1
if rr > 0 then full = math.max(full, (rb - r) / rr) end
if tr > 0 then full = math.max(full, (tb - t) / tr) end
redis.call('HSET', KEYS[1], 'r', string.format('%.17g', r), 't', string.format('%.17g', t),
  'at', string.format('%.6f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil(full * 1000) + 1000)
return string.format('%.6f', wait)
"""
"""KEYS: the bucket. ARGV: rate and size of requests, of tokens, costs, whether to take in any case. Gives the wait in
seconds; 0: taken. A bucket that would be full by now is forgotten."""


@dataclass(frozen=True)
class Rates:
    """Of one tenant's bucket; a rate of 0 does not limit."""

    requests: float
    tokens: float

    @classmethod
    def of(cls, limits: TenantLimits, share: int = 1) -> Rates:
        """`share`: between so many routers."""
        return cls((limits.requests_per_second or 0.0) / share, (limits.tokens_per_second or 0.0) / share)

    @property
    def sizes(self) -> tuple[float, float]:
        """What the bucket holds: requests, tokens."""
        return max(1.0, self.requests * BURST_S), max(1.0, self.tokens * BURST_S)


class LocalBuckets:
    """The script's twin in this process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._levels: dict[bytes, tuple[float, float, float]] = {}

    def take(self, key: bytes, rates: Rates, requests: float, tokens: float, *, always: bool = False) -> float:
        """Seconds to wait; 0: taken."""
        now = self._clock.monotonic()
        most_r, most_t = rates.sizes
        r, t, at = self._levels.get(key, (most_r, most_t, now))
        r, t = min(most_r, r + (now - at) * rates.requests), min(most_t, t + (now - at) * rates.tokens)
        wait = 0.0
        if not always:
            if rates.requests > 0 and r < requests:
                wait = (requests - r) / rates.requests
            if rates.tokens > 0 and t <= 0:
                wait = max(wait, (1 - t) / rates.tokens)
        if wait == 0:
            r, t = r - requests, t - tokens
        if key not in self._levels and len(self._levels) >= MAX_LOCAL:
            del self._levels[max(self._levels, key=lambda one: self._levels[one][0])]
        self._levels[key] = r, t, now
        return wait


class SharedBuckets:
    """The buckets in Redis. Belongs to the event loop's thread; calls run on threads of its own."""

    def __init__(self, url: str, prefix: str, deadline_s: float, clock: Clock) -> None:
        """Raises RedisUrlError."""
        self._clock = clock
        self._calls = RedisCalls(url, breaker=CircuitBreaker(monotonic=clock.monotonic), monotonic=clock.monotonic)
        self._prefix = prefix
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="limits")
        self._under_way = 0

    async def take(
        self, key: bytes, rates: Rates, requests: float, tokens: float, *, always: bool = False
    ) -> float | None:
        """Seconds to wait, 0: taken; None: Redis does not say."""
        if self._under_way >= AT_ONCE:
            return None
        size_r, size_t = rates.sizes
        numbers = (rates.requests, size_r, rates.tokens, size_t, requests, tokens, int(always))
        command: Command = ("EVAL", TAKE, 1, f"{self._prefix}{key.hex()}", *map(str, numbers))
        until = self._clock.monotonic() + self._deadline_s
        self._under_way += 1
        try:
            answer: Any = await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: self._calls.one(command, until)
            )
        except IndexUnavailable as error:
            _log.debug("limits are this router's share", error=str(error))
            return None
        finally:
            self._under_way -= 1
        return float(answer)

    async def close(self) -> None:
        """No question comes any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._calls.close)


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
    """What one request has cost so far."""

    def __init__(self, estimate: int) -> None:
        self.estimate = estimate
        self.used: int | None = None

    def see(self, response: inference_pb2.GenerateResponse) -> None:
        """A response on its way to the client."""
        if response.HasField("usage"):
            self.used = response.usage.prompt_tokens + response.usage.completion_tokens


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
        """Room for one request while the block runs. Raises ResourceExhausted with the time to come back."""
        limits, key = tenant.limits, tenant.keys.tag
        charge = Charge(0 if request.resume else estimate(request.prompt))
        if limits.max_concurrent is not None:
            if self._running[key] >= math.ceil(limits.max_concurrent / self._routers()):
                self._refuse("concurrent", f"{limits.max_concurrent} requests at once are yours", CONCURRENT_RETRY_S)
            self._running[key] += 1
        try:
            if limits.requests_per_second is None and limits.tokens_per_second is None:
                yield charge
                return
            wait = await self._take(key, limits, 1, charge.estimate)
            if wait > 0:
                self._refuse("rate", "the rate of your requests or tokens is above what is yours", wait)
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

    def _refuse(self, limit: str, what: str, wait_s: float) -> NoReturn:
        self.refused[limit] += 1
        raise ResourceExhausted(f"{what}; come back later", retry_after_s=math.ceil(wait_s * 1000) / 1000)

    async def _take(
        self, key: bytes, limits: TenantLimits, requests: float, tokens: float, *, always: bool = False
    ) -> float:
        if self._shared is not None:
            wait = await self._shared.take(key, Rates.of(limits), requests, tokens, always=always)
            if wait is not None:
                return wait
        self.by_share += 1
        return self._local.take(key, Rates.of(limits, self._routers()), requests, tokens, always=always)

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
