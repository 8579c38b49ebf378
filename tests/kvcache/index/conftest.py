"""The indexes under test. Redis servers live for a module; every test has an index of its own name."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.kvcache.index.base import Index
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.index.open import open_index
from tests.kvcache.index.redis_server import RedisServer

KINDS = ("dict", "sqlite", "redis", "redis-tls")
OpenIndex = Callable[[], Index]


@pytest.fixture(scope="module")
def redis_plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def redis_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis-tls"), tls=True)
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=KINDS)
def open_one(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenIndex]:
    """Opens an index; opened again, a shared one is the same index in another process's eyes."""
    opened: list[Index] = []
    name = uuid.uuid4().hex
    if request.param == "dict":
        twin = DictIndex()
    elif request.param != "sqlite":
        fixture = "redis_plain" if request.param == "redis" else "redis_tls"
        url = request.getfixturevalue(fixture).url

    def open_it() -> Index:
        if request.param == "dict":
            return twin
        index = open_index("sqlite" if request.param == "sqlite" else url, tmp_path, name)
        opened.append(index)
        return index

    yield open_it
    for index in opened:
        index.close()


@pytest.fixture
def index(open_one: OpenIndex) -> Index:
    return open_one()
