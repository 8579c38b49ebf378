"""Stored responses, bounded for each tenant: in this process's memory, or in a Redis that gateways share (L12).

A response lies under its own name and says whose it is. Owners are tenants as the routers tell them, each of one served
model: equal names of tenants in two clusters are two owners (L25). Whoever asks compares.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import redis.asyncio
import redis.exceptions

from headrace.services.gateway.settings import ResponsesSection
from headrace.services.runtime.errors import Unavailable

RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True)
class Stored:
    """One response."""

    owner: str
    """See owner_of."""
    model: str
    response: dict[str, Any]
    """As it was answered."""
    items: list[Any]
    """The input, that of the responses before it included."""


def owner_of(model: str, tenant: str) -> str:
    """32 hexadecimal digits: SHA-256 over both names, each behind its length in bytes (LE64)."""
    fields = b"".join(len(name).to_bytes(8, "little") + name for name in (model.encode(), tenant.encode()))
    return hashlib.sha256(b"headrace.responses\0" + fields).hexdigest()[:32]


def encode(stored: Stored) -> bytes:
    """As it is kept."""
    return json.dumps(asdict(stored), ensure_ascii=False, separators=(",", ":")).encode()


class ResponseStore(Protocol):
    """Both stores. Raise Unavailable where the shared one does not answer."""

    async def put(self, owner: str, identifier: str, data: bytes) -> None:
        """Keep one, `encode`d; the owner's oldest is forgotten when there are too many."""
        ...

    async def get(self, identifier: str) -> Stored | None:
        """Whoever's it is."""
        ...

    async def delete(self, owner: str, identifier: str) -> bool:
        """Forget one of this owner's. Whether it was there."""
        ...

    async def close(self) -> None: ...


class MemoryStore:
    """Of this process: another gateway knows nothing of it."""

    def __init__(self, settings: ResponsesSection, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._monotonic = monotonic
        self._kept: dict[str, tuple[float, bytes]] = {}
        """Until when, and what, by identifier."""
        self._owners: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        """Identifiers of each owner, oldest first; the owner used last is the last."""
        self._bytes: Counter[str] = Counter()
        """Of each owner."""

    async def put(self, owner: str, identifier: str, data: bytes) -> None:
        self._forget(owner, identifier)
        own = self._owners.setdefault(owner, OrderedDict())
        self._owners.move_to_end(owner)
        own[identifier] = None
        self._kept[identifier] = (self._monotonic() + self._settings.keep_seconds, data)
        self._bytes[owner] += len(data)
        while len(own) > self._settings.per_tenant:
            self._forget(owner, next(iter(own)))
        while len(self._owners) > self._settings.max_tenants:
            oldest = next(iter(self._owners))
            for forgotten in tuple(self._owners[oldest]):
                self._forget(oldest, forgotten)
            del self._owners[oldest]
        while self._bytes.total() > self._settings.memory_bytes:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self._forget(largest, next(iter(self._owners[largest])))

    def _forget(self, owner: str, identifier: str) -> bool:
        own = self._owners.get(owner, OrderedDict())
        if identifier not in own:
            return False
        del own[identifier]
        self._bytes[owner] -= len(self._kept.pop(identifier)[1])
        if not self._bytes[owner]:
            del self._bytes[owner]
        return True

    async def get(self, identifier: str) -> Stored | None:
        ends, data = self._kept.get(identifier, (0.0, b""))
        if not data or ends <= self._monotonic():
            return None
        stored = Stored(**json.loads(data))
        self._owners.move_to_end(stored.owner)
        return stored

    async def delete(self, owner: str, identifier: str) -> bool:
        return self._forget(owner, identifier)

    async def close(self) -> None:
        self._owners.clear()
        self._bytes.clear()
        self._kept.clear()


class RedisStore:
    """Shared by all gateways that name the same Redis and prefix."""

    def __init__(self, url: str, settings: ResponsesSection) -> None:
        deadline = settings.deadline_ms / 1000
        self._settings = settings
        self._redis = redis.asyncio.from_url(url, socket_timeout=deadline, socket_connect_timeout=deadline)

    def _key(self, identifier: str) -> str:
        return f"{self._settings.prefix}id:{identifier}"  # callers choose what they ask for, and get no index

    def _index(self, owner: str) -> str:
        return f"{self._settings.prefix}of:{owner}"

    async def put(self, owner: str, identifier: str, data: bytes) -> None:
        index, keep = self._index(owner), self._settings.keep_seconds
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self._key(identifier), data, ex=keep)
                pipe.zadd(index, {identifier: time.time()})
                pipe.expire(index, keep)
                pipe.zrange(index, 0, -(self._settings.per_tenant + 1))
                oldest = (await pipe.execute())[-1]
            if oldest:
                async with self._redis.pipeline(transaction=True) as pipe:
                    pipe.delete(*(self._key(one.decode()) for one in oldest))
                    pipe.zrem(index, *oldest)
                    await pipe.execute()
        except (redis.exceptions.RedisError, OSError) as error:
            raise _unavailable() from error

    async def get(self, identifier: str) -> Stored | None:
        try:
            data = await self._redis.get(self._key(identifier))
        except (redis.exceptions.RedisError, OSError) as error:
            raise _unavailable() from error
        return None if data is None else Stored(**json.loads(data))

    async def delete(self, owner: str, identifier: str) -> bool:
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(self._key(identifier))
                pipe.zrem(self._index(owner), identifier)
                return bool((await pipe.execute())[0])
        except (redis.exceptions.RedisError, OSError) as error:
            raise _unavailable() from error

    async def close(self) -> None:
        await self._redis.aclose()


def open_store(settings: ResponsesSection) -> ResponseStore:
    """As the settings say."""
    if settings.redis is None:
        return MemoryStore(settings)
    return RedisStore(settings.redis.get_secret_value(), settings)


def _unavailable() -> Unavailable:
    return Unavailable("the store of responses does not answer; try again", retry_after_s=RETRY_AFTER_S)
