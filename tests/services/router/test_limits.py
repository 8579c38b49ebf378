"""Limits of tenants: cluster-wide by Redis, by share without it, and what is said to who is over them (L12)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kvcache.index.breaker import CircuitBreaker
from headrace.kvcache.index.redis_calls import RedisCalls
from headrace.services.router.api_keys import TenantLimits
from headrace.services.router.buckets import BURST_S, LocalBuckets, Rates, SharedBuckets
from headrace.services.router.limits import Limiter, RateExceeded, estimate
from headrace.services.router.main import shared_buckets_url
from headrace.services.router.settings import RouterSettings
from headrace.services.router.tenants import Tenant, TenantKeys
from headrace.services.runtime.clock import SystemClock
from headrace.services.runtime.errors import ResourceExhausted, http_status, to_proto
from headrace.v1 import common_pb2, inference_pb2
from tests.kvcache.index.redis_server import RedisServer

KEY = b"k" * 16


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def tenant(name: str = "acme", **limits: float) -> Tenant:
    return Tenant(name, TenantKeys(b"s" * 16, name), limits=TenantLimits.model_validate(limits))


def ask(tokens: int = 10) -> inference_pb2.GenerateRequest:
    prompt = inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=[1] * tokens))
    return inference_pb2.GenerateRequest(prompt=prompt)


def usage(prompt: int, completion: int) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(usage=common_pb2.Usage(prompt_tokens=prompt, completion_tokens=completion))


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.mark.parametrize(
    ("index", "shared", "url"),
    [
        ("redis://a/0", None, "redis://a/0"),
        ("rediss://a/0", None, "rediss://a/0"),
        ("unix:///run/redis.sock?db=0", None, "unix:///run/redis.sock?db=0"),
        ("sqlite", None, None),
        ("sqlite:///a", None, None),
        ("redis://a/0", "redis://b/0", "redis://b/0"),
    ],
)
def test_the_buckets_are_in_the_redis_of_the_index(index: str, shared: str | None, url: str | None) -> None:
    """L12: every address that the index takes for Redis; else each router would give out its share alone."""
    assert shared_buckets_url(RouterSettings(index={"store_index": index}, limits={"shared": shared})) == url  # type: ignore[arg-type]


async def passes(limiter: Limiter, who: Tenant, request: inference_pb2.GenerateRequest) -> float:
    """0: taken, else the time to come back."""
    try:
        async with limiter.request(who, request):
            return 0.0
    except ResourceExhausted as error:
        return error.retry_after_s or 0.0


async def test_requests_pass_at_their_rate_and_are_told_when_to_come_back() -> None:
    """Ten seconds' worth at once, then one at a time, each when the refusal said; 429 with Retry-After."""
    clock = Clock()
    limiter, who = Limiter(None, lambda: 1, clock), tenant(requests_per_second=2)
    assert [await passes(limiter, who, ask()) for _ in range(20)] == [0.0] * 20
    wait = await passes(limiter, who, ask())
    assert wait == pytest.approx(0.5)
    assert await passes(limiter, tenant("umbrella", requests_per_second=2), ask()) == 0
    clock.now += wait
    assert await passes(limiter, who, ask()) == 0
    with pytest.raises(ResourceExhausted) as caught:
        async with limiter.request(who, ask()):
            pass
    assert http_status(caught.value) == 429
    assert to_proto(caught.value).retry_after_ms == 500
    assert limiter.refused == {"rate": 2}
    assert await passes(limiter, tenant(), ask()) == 0


async def test_tokens_are_charged_by_usage_and_debt_is_waited_for() -> None:
    clock = Clock()
    limiter, who = Limiter(None, lambda: 1, clock), tenant(tokens_per_second=10)
    async with limiter.request(who, ask(50)) as charge:
        charge.see(inference_pb2.GenerateResponse(tokens=common_pb2.TokensEvent()))
        charge.see(usage(50, 150))
    await limiter.close()
    # The bucket held 100; the request used 200.
    assert await passes(limiter, who, ask()) == pytest.approx(10.1)
    clock.now += 10.2
    assert await passes(limiter, who, ask()) == 0


async def test_a_request_that_ends_without_usage_keeps_its_estimate() -> None:
    limiter, who = Limiter(None, lambda: 1, Clock()), tenant(tokens_per_second=1)
    assert await passes(limiter, who, ask(10)) == 0
    assert await passes(limiter, who, ask(10)) > 0


async def test_a_tenant_is_told_what_is_left_of_its_rates() -> None:
    """L25: its own and no other's, also when it is refused; a rate that does not limit is not told of."""
    clock = Clock()
    limiter, who = Limiter(None, lambda: 1, clock), tenant(requests_per_second=0.2, tokens_per_second=10)
    async with limiter.request(who, ask(30)) as charge:
        assert charge.caller == inference_pb2.Caller(
            tenant="acme",
            requests=inference_pb2.RateLevel(limit=2, remaining=1, reset_ms=5000),
            tokens=inference_pb2.RateLevel(limit=100, remaining=70, reset_ms=3000),
        )
    assert await passes(limiter, who, ask(200)) == 0
    with pytest.raises(RateExceeded) as caught:
        async with limiter.request(who, ask()):
            pass
    told = caught.value.caller
    assert (told.requests.remaining, told.tokens.remaining, told.tokens.reset_ms) == (0, 0, 23_000)
    async with limiter.request(tenant("umbrella", tokens_per_second=1), ask(3)) as charge:
        assert not charge.caller.HasField("requests")
        assert charge.caller.tokens.remaining == 7
    async with limiter.request(tenant("free"), ask()) as charge:
        assert charge.caller == inference_pb2.Caller(tenant="free")


async def test_concurrent_requests_are_bounded_and_come_free() -> None:
    """The bound is divided by the routers that live, rounded up."""
    routers = 1
    limiter, who = Limiter(None, lambda: routers, Clock()), tenant(max_concurrent=3)
    async with AsyncExitStack() as running:
        for _ in range(3):
            await running.enter_async_context(limiter.request(who, ask()))
        assert await passes(limiter, who, ask()) == 1.0
        assert await passes(limiter, tenant("umbrella", max_concurrent=3), ask()) == 0
    assert await passes(limiter, who, ask()) == 0
    routers = 2
    async with AsyncExitStack() as running:
        for _ in range(2):
            await running.enter_async_context(limiter.request(who, ask()))
        assert await passes(limiter, who, ask()) == 1.0
    assert not limiter._running


async def test_two_routers_share_one_bucket(redis: RedisServer) -> None:
    """Together they let through what one would; without Redis each its half."""
    clock = SystemClock()
    limiters = [Limiter(SharedBuckets(redis.url, "two:", 10.0, clock), lambda: 2, clock) for _ in range(2)]
    who = tenant(requests_per_second=0.001)
    passed = [await passes(limiter, who, ask()) == 0 for limiter in limiters for _ in range(3)]
    assert passed == [True, *[False] * 5]
    assert not any(limiter.by_share for limiter in limiters)
    for limiter in limiters:
        await limiter.close()


async def test_without_redis_each_router_takes_its_share(tmp_path: Path) -> None:
    clock = Clock()
    limiters = [
        Limiter(SharedBuckets(f"unix://{tmp_path}/nobody", "x:", 10.0, SystemClock()), lambda: 2, clock)
        for _ in range(2)
    ]
    who = tenant(requests_per_second=2)
    for limiter in limiters:
        assert [await passes(limiter, who, ask()) for _ in range(10)] == [0.0] * 10
        assert await passes(limiter, who, ask()) == pytest.approx(1.0)
        assert limiter.by_share == 11
        await limiter.close()


@given(
    st.lists(
        st.tuples(st.sampled_from((0, 1)), st.integers(0, 400), st.booleans()),
        max_size=8,
    ),
    st.sampled_from((Rates(0.001, 0.002), Rates(0.0, 0.01), Rates(1e-6, 0.0))),
    st.uuids(),
)
@settings(max_examples=8, deadline=None)
def test_the_script_and_its_twin_agree(
    redis: RedisServer, steps: list[tuple[int, int, bool]], rates: Rates, name: object
) -> None:
    """Redis' own clock goes on meanwhile, so the rates are tiny, and a wait is compared as taken or not."""
    import asyncio

    shared = SharedBuckets(redis.url, f"{name}:", 10.0, SystemClock())
    local = LocalBuckets(SystemClock())

    async def both() -> None:
        for requests, tokens, always in steps:
            theirs = await shared.take(KEY, rates, requests, tokens, always=always)
            assert theirs is not None
            mine = local.take(KEY, rates, requests, tokens, always=always)
            assert (theirs.wait_s > 0) == (mine.wait_s > 0)
            assert theirs.wait_s == pytest.approx(mine.wait_s, rel=0.01, abs=30.0)
            assert (theirs.requests, theirs.tokens) == pytest.approx((mine.requests, mine.tokens), abs=1.0)
        await shared.close()

    asyncio.run(both())


async def test_buckets_are_forgotten_when_they_are_full(redis: RedisServer) -> None:
    """No tenant's name stands in Redis, and a bucket ends with the time in which it fills."""
    shared = SharedBuckets(redis.url, "end:", 10.0, SystemClock())
    taken = await shared.take(KEY, Rates(1.0, 5.0), 1, 10)
    assert taken is not None
    assert taken.wait_s == 0
    calls = RedisCalls(redis.url, breaker=CircuitBreaker())
    left = calls.one(("PTTL", f"end:{KEY.hex()}"), SystemClock().monotonic() + 10)
    assert 0 < left <= 2000 + 1000 + BURST_S * 1000
    calls.close()
    await shared.close()


def test_estimates() -> None:
    assert estimate(ask(7).prompt) == 7
    assert estimate(inference_pb2.Prompt(text=inference_pb2.TextPrompt(text="x" * 40))) == 10
    message = inference_pb2.ChatMessage(content=[inference_pb2.ContentPart(text="y" * 8)] * 2)
    assert estimate(inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=[message]))) == 4
    assert estimate(inference_pb2.Prompt()) == 0
