"""Stored responses, bounded for each credential: in this process's memory, or in a Redis that gateways share (L12).

Owners are digests of credentials, so that a key finds its own responses alone (L25); that the key is still good is the
router's to say, and asked for before anything is given out.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
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

    model: str
    response: dict[str, Any]
    """As it was answered."""
    items: list[Any]
    """The input, that of the responses before it included."""


def owner_of(credential: str | None) -> str:
    """32 hexadecimal digits."""
    return hashlib.sha256(b"headrace.responses\0" + (credential or "").encode()).hexdigest()[:32]


def encode(stored: Stored) -> bytes:
    """As it is kept."""
    return json.dumps(asdict(stored), ensure_ascii=False, separators=(",", ":")).encode()


class ResponseStore(Protocol):
    """Both stores. Raise Unavailable where the shared one does not answer."""

    async def put(self, owner: str, identifier: str, data: bytes) -> None:
        """Keep one; the owner's oldest is forgotten when there are too many."""
        ...

    async def get(self, owner: str, identifier: str) -> Stored | None: ...

    async def delete(self, owner: str, identifier: str) -> bool:
        """Whether it was there."""
        ...

    async def close(self) -> None: ...


class MemoryStore:
    """Of this process: another gateway knows nothing of it."""

    def __init__(self, settings: ResponsesSection, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._monotonic = monotonic
        self._owners: OrderedDict[str, OrderedDict[str, tuple[float, bytes]]] = OrderedDict()

    async def put(self, owner: str, identifier: str, data: bytes) -> None:
        own = self._owners.setdefault(owner, OrderedDict())
        self._owners.move_to_end(owner)
        own[identifier] = (self._monotonic() + self._settings.keep_seconds, data)
        while len(own) > self._settings.per_credential:
            own.popitem(last=False)
        while len(self._owners) > self._settings.max_credentials:
            self._owners.popitem(last=False)

    async def get(self, owner: str, identifier: str) -> Stored | None:
        ends, data = self._own(owner).get(identifier, (0.0, b""))
        if not data or ends <= self._monotonic():
            return None
        return Stored(**json.loads(data))

    async def delete(self, owner: str, identifier: str) -> bool:
        return self._own(owner).pop(identifier, None) is not None

    async def close(self) -> None:
        self._owners.clear()

    def _own(self, owner: str) -> OrderedDict[str, tuple[float, bytes]]:
        if owner not in self._owners:
            return OrderedDict()
        self._owners.move_to_end(owner)
        return self._owners[owner]


class RedisStore:
    """Shared by all gateways that name the same Redis and prefix."""

    def __init__(self, url: str, settings: ResponsesSection) -> None:
        deadline = settings.deadline_ms / 1000
        self._settings = settings
        self._redis = redis.asyncio.from_url(url, socket_timeout=deadline, socket_connect_timeout=deadline)

    def _key(self, owner: str, identifier: str) -> str:
        return f"{self._settings.prefix}{{{owner}}}:{identifier}"

    async def put(self, owner: str, identifier: str, data: bytes) -> None:
        index, keep = self._key(owner, "index"), self._settings.keep_seconds
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self._key(owner, identifier), data, ex=keep)
                pipe.zadd(index, {identifier: time.time()})
                pipe.expire(index, keep)
                pipe.zrange(index, 0, -(self._settings.per_credential + 1))
                oldest = (await pipe.execute())[-1]
            if oldest:
                async with self._redis.pipeline(transaction=True) as pipe:
                    pipe.delete(*(self._key(owner, one.decode()) for one in oldest))
                    pipe.zrem(index, *oldest)
                    await pipe.execute()
        except (redis.exceptions.RedisError, OSError) as error:
            raise _unavailable() from error

    async def get(self, owner: str, identifier: str) -> Stored | None:
        try:
            data = await self._redis.get(self._key(owner, identifier))
        except (redis.exceptions.RedisError, OSError) as error:
            raise _unavailable() from error
        return None if data is None else Stored(**json.loads(data))

    async def delete(self, owner: str, identifier: str) -> bool:
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(self._key(owner, identifier))
                pipe.zrem(self._key(owner, "index"), identifier)
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
