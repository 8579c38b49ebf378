"""Rate-limit headers in the words of both APIs, on answers, streams and refusals (L12, L25)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest
import pytest_asyncio

from headrace.services.gateway.rates import rate_headers
from headrace.services.runtime.errors import ResourceExhausted
from headrace.v1 import inference_pb2
from tests.services.gateway.fakes import World, fails, says

LEVELS = inference_pb2.Caller(
    requests=inference_pb2.RateLevel(limit=20, remaining=19, reset_ms=50),
    tokens=inference_pb2.RateLevel(limit=9000, remaining=0, reset_ms=90_500),
)
CHAT = {"model": "plain", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "plain", "prompt": "Hi"},
    "/v1/responses": {"model": "plain", "input": "Hi"},
    "/v1/messages": CHAT,
}


@pytest_asyncio.fixture
async def http(world: World) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=world.url, timeout=60.0) as made:
        yield made


def test_the_words_of_each_api() -> None:
    assert rate_headers("openai", LEVELS, 0.0) == {
        "x-ratelimit-limit-requests": "20",
        "x-ratelimit-remaining-requests": "19",
        "x-ratelimit-reset-requests": "50ms",
        "x-ratelimit-limit-tokens": "9000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m30.5s",
    }
    assert rate_headers("anthropic", LEVELS, 1_800_000_000.25) == {
        "anthropic-ratelimit-requests-limit": "20",
        "anthropic-ratelimit-requests-remaining": "19",
        "anthropic-ratelimit-requests-reset": "2027-01-15T08:00:01Z",
        "anthropic-ratelimit-tokens-limit": "9000",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "2027-01-15T08:01:31Z",
    }
    assert rate_headers("openai", inference_pb2.Caller(tenant="free"), 0.0) == {}
    assert rate_headers("openai", None, 0.0) == {}


@pytest.mark.parametrize("path", BODIES)
async def test_answers_streams_and_refusals_have_them(world: World, http: httpx2.AsyncClient, path: str) -> None:
    world.router.levels = LEVELS
    name = "anthropic-ratelimit-requests-remaining" if "messages" in path else "x-ratelimit-remaining-requests"
    for more in ({}, {"stream": True}):
        answer = await http.post(path, json={**BODIES[path], **more})
        assert (answer.status_code, answer.headers[name]) == (200, "19")
    world.router.script = fails(ResourceExhausted("too many", retry_after_s=1.5))
    for more in ({}, {"stream": True}):
        answer = await http.post(path, json={**BODIES[path], **more})
        assert (answer.status_code, answer.headers["retry-after"], answer.headers[name]) == (429, "2", "19")
    world.router.levels, world.router.script = inference_pb2.Caller(), says("hello")
    answer = await http.post(path, json=BODIES[path])
    assert not [header for header in answer.headers if "ratelimit" in header]
