"""Token buckets of requests and tokens: in the shared index (Redis), one script per question, and the script's twin."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from headrace.kvcache.index.base import IndexUnavailable
from headrace.kvcache.index.breaker import CircuitBreaker
from headrace.kvcache.index.redis_calls import Command, RedisCalls
from headrace.services.router.api_keys import TenantLimits
from headrace.services.runtime import logs
from headrace.services.runtime.clock import Clock
from headrace.v1 import inference_pb2

BURST_S: Final = 10.0
"""A bucket holds what its rate gives in so many seconds, and one request at least."""
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
return {string.format('%.6f', wait), string.format('%.6f', r), string.format('%.6f', t)}
"""
"""KEYS: the bucket. ARGV: rate and size of requests, of tokens, costs, whether to take in any case. Gives the wait in
seconds (0: taken) and what is in the bucket now: requests, tokens. A bucket that would be full by now is forgotten."""


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


@dataclass(frozen=True)
class Taken:
    """What a bucket answered."""

    wait_s: float
    """0: taken."""
    requests: float
    """What is in it now. Tokens may be in debt."""
    tokens: float

    def told(self, rates: Rates, caller: inference_pb2.Caller) -> None:
        """Into `caller` what its own tenant may know (L25): the rates that limit it."""
        size_r, size_t = rates.sizes
        if rates.requests > 0:
            caller.requests.CopyFrom(_level(rates.requests, size_r, self.requests))
        if rates.tokens > 0:
            caller.tokens.CopyFrom(_level(rates.tokens, size_t, self.tokens))


def _level(rate: float, size: float, left: float) -> inference_pb2.RateLevel:
    reset_ms = math.ceil(max(0.0, size - left) / rate * 1000)
    return inference_pb2.RateLevel(limit=int(size), remaining=max(0, int(left)), reset_ms=reset_ms)


class LocalBuckets:
    """The script's twin in this process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._levels: dict[bytes, tuple[float, float, float]] = {}

    def take(self, key: bytes, rates: Rates, requests: float, tokens: float, *, always: bool = False) -> Taken:
        """The script's answer."""
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
        return Taken(wait, r, t)


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
    ) -> Taken | None:
        """The script's answer; None: Redis does not say."""
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
        return Taken(*map(float, answer))

    async def close(self) -> None:
        """No question comes any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._calls.close)
