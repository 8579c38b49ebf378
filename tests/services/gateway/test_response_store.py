"""Both stores of responses keep the same promises (L12, L25)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from pydantic import ByteSize, SecretStr

from headrace.services.gateway.response_store import MemoryStore, ResponseStore, Stored, encode, open_store, owner_of
from headrace.services.gateway.settings import ResponsesSection
from headrace.services.runtime.errors import Unavailable
from tests.kvcache.index.redis_server import RedisServer

LIMITS = ResponsesSection(per_tenant=2, max_tenants=2, deadline_ms=60_000)


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


def stored(owner: str, identifier: str) -> bytes:
    return encode(Stored(owner, "m", {"id": identifier, "output": []}, [{"role": "user", "content": "ü"}]))


def test_owners_are_tenants_of_one_model() -> None:
    """L25: equal names in two clusters are two tenants, and no two pairs of names look alike."""
    assert owner_of("m", "acme") == owner_of("m", "acme")
    assert len({owner_of("m", "acme"), owner_of("n", "acme"), owner_of("m", "x"), owner_of("ma", "cme")}) == 4


async def test_what_is_kept(store: ResponseStore) -> None:
    """A tenant's bound is its own, and nobody else's responses go for it."""
    one, other = owner_of("m", "one"), owner_of("m", "other")
    await store.put(other, "z", stored(other, "z"))
    await store.put(one, "a", stored(one, "a"))
    found = await store.get("a")
    assert found is not None
    assert (found.owner, found.response["id"], found.items[0]["content"]) == (one, "a", "ü")
    await store.put(one, "b", stored(one, "b"))
    await store.put(one, "c", stored(one, "c"))
    assert await store.get("a") is None
    assert await store.get("c") is not None
    assert await store.delete(one, "c") is True
    assert await store.delete(one, "c") is False
    assert await store.get("c") is None
    assert await store.get("z") is not None
    assert await store.get(f"of:{other}") is None  # the name of no response, whatever lies there


async def test_memory_is_bounded_in_tenants_and_time() -> None:
    now = 0.0
    store = MemoryStore(LIMITS, lambda: now)
    for name in ("a", "b", "c"):
        owner = owner_of("m", name)
        await store.put(owner, f"of {name}", stored(owner, "x"))
    assert await store.get("of a") is None
    assert await store.get("of c") is not None
    now = LIMITS.keep_seconds + 1.0
    assert await store.get("of c") is None


async def test_memory_is_bounded_in_bytes() -> None:
    """L12: whoever has most gives way, and nobody else."""
    store = MemoryStore(ResponsesSection(memory_bytes=ByteSize(9_000)))
    small, large = (owner_of("m", name) for name in ("small", "large"))
    for name in ("a", "b"):
        await store.put(small, name, bytes(1_000))
    for number in range(9):
        await store.put(large, f"l{number}", bytes(1_000))
    assert await store.delete(small, "a")
    assert await store.delete(small, "b")
    kept = [await store.delete(large, f"l{number}") for number in range(9)]
    assert kept == [number >= 2 for number in range(9)]


async def test_a_redis_that_is_away() -> None:
    """L6, L12: said, within the deadline."""
    nowhere = open_store(ResponsesSection(redis=SecretStr("redis://127.0.0.1:1/0"), deadline_ms=500))
    calls: list[Any] = [nowhere.get("x"), nowhere.put("o", "x", json.dumps({}).encode()), nowhere.delete("o", "x")]
    for call in calls:
        with pytest.raises(Unavailable):
            await call
    await nowhere.close()
