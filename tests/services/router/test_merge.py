"""Several generators as one: nothing lost, nothing left open, no item ahead of the consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from headrace.services.router.merge import merged


async def way(name: str, count: int, closed: list[str], fails: bool = False) -> AsyncGenerator[str, None]:
    try:
        for index in range(count):
            await asyncio.sleep(0)
            yield f"{name}{index}"
        if fails:
            raise ValueError(name)
    finally:
        closed.append(name)


async def test_everything_comes_in_each_ones_order() -> None:
    closed: list[str] = []
    items = [item async for item in merged([way("a", 5, closed), way("b", 3, closed), way("c", 0, closed)])]
    assert [item for item in items if item[0] == "a"] == [f"a{index}" for index in range(5)]
    assert [item for item in items if item[0] == "b"] == [f"b{index}" for index in range(3)]
    assert sorted(closed) == ["a", "b", "c"]


async def test_the_first_failure_ends_all() -> None:
    closed: list[str] = []
    with pytest.raises(ValueError, match="b"):
        async for _ in merged([way("a", 10**6, closed), way("b", 2, closed, fails=True)]):
            pass
    assert sorted(closed) == ["a", "b"]


async def test_a_consumer_that_leaves_closes_them() -> None:
    """L10."""
    closed: list[str] = []
    async with aclosing(merged([way("a", 10**6, closed), way("b", 10**6, closed)])) as items:
        async for _ in items:
            break
    assert sorted(closed) == ["a", "b"]


async def test_a_slow_consumer_holds_them_back() -> None:
    """Credit is given for what was consumed, so nothing may run ahead."""
    made: list[int] = []

    async def counting() -> AsyncGenerator[int, None]:
        for index in range(100):
            made.append(index)
            yield index

    async with aclosing(merged([counting()])) as items:
        await anext(items)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(made) <= 3
