"""Several asynchronous generators as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(ways: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all in the order in which they come, none ahead of the consumer by more than one. The first failure ends
    all. Closing it closes them."""
    items: asyncio.Queue[T] = asyncio.Queue(1)

    async def pump(way: AsyncGenerator[T, None]) -> None:
        async with aclosing(way):
            async for item in way:
                await items.put(item)

    running = {asyncio.create_task(pump(way)) for way in ways}
    getter: asyncio.Task[T] | None = None
    try:
        while running or not items.empty():
            getter = asyncio.create_task(items.get())
            await asyncio.wait({getter, *running}, return_when=asyncio.FIRST_COMPLETED)
            ended = {task for task in running if task.done()}
            running -= ended
            for task in ended:
                task.result()
            if getter.done():
                item = getter.result()
                getter = None
                yield item
            else:
                getter.cancel()
    finally:
        tasks = [*running, *(() if getter is None else (getter,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
