"""A gateway before a router that says what the test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.services.gateway.fakes import World, a_world


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(tmp_path, keepalive_seconds=0.2) as made:
        yield made
        assert len(made.gateway.door.live) == 0  # L11
