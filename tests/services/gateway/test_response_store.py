"""Both stores of responses keep the same promises (L12, L25)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from pydantic import SecretStr

from headrace.services.gateway.response_store import MemoryStore, ResponseStore, Stored, encode, open_store, owner_of
from headrace.services.gateway.settings import ResponsesSection
from headrace.services.runtime.errors import Unavailable
from tests.kvcache.index.redis_server import RedisServer

LIMITS = ResponsesSection(per_credential=2, max_credentials=2, deadline_ms=60_000)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest_asyncio.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[ResponseStore]:
    settings = LIMITS
    if request.param == "redis":
        settings = LIMITS.model_copy(update={"redis": SecretStr(request.getfixturevalue("redis").url)})
    made = open_store(settings)
    yield made
    await made.close()


def stored(identifier: str) -> bytes:
    return encode(Stored("m", {"id": identifier, "output": []}, [{"role": "user", "content": "ü"}]))


async def test_what_is_kept(store: ResponseStore) -> None:
    one, other = owner_of("key-1"), owner_of("key-2")
    await store.put(one, "a", stored("a"))
    found = await store.get(one, "a")
    assert found is not None
    assert (found.response["id"], found.items[0]["content"]) == ("a", "ü")
    assert await store.get(other, "a") is None
    assert await store.delete(other, "a") is False
    await store.put(one, "b", stored("b"))
    await store.put(one, "c", stored("c"))
    assert await store.get(one, "a") is None
    assert await store.get(one, "c") is not None
    assert await store.delete(one, "c") is True
    assert await store.get(one, "c") is None


async def test_memory_is_bounded_in_keys_and_time() -> None:
    now = 0.0
    store = MemoryStore(LIMITS, lambda: now)
    for key in ("a", "b", "c"):
        await store.put(owner_of(key), "x", stored("x"))
    assert await store.get(owner_of("a"), "x") is None
    assert await store.get(owner_of("c"), "x") is not None
    now = LIMITS.keep_seconds + 1.0
    assert await store.get(owner_of("c"), "x") is None


async def test_a_redis_that_is_away() -> None:
    """L6, L12: said, within the deadline."""
    nowhere = open_store(ResponsesSection(redis=SecretStr("redis://127.0.0.1:1/0"), deadline_ms=500))
    calls: list[Any] = [nowhere.get("o", "x"), nowhere.put("o", "x", json.dumps({}).encode()), nowhere.delete("o", "x")]
    for call in calls:
        with pytest.raises(Unavailable):
            await call
    await nowhere.close()
