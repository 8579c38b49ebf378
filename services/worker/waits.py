"""Waiting on the event loop for what another thread makes."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def waiting_for(work: Future[T]) -> asyncio.Future[T]:
    """Done with `work`, on the running loop. Not asyncio.wrap_future: cancelling the wait does not cancel the work, for
    which others may wait, or which nobody may take back."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[T] = loop.create_future()

    def answered(done: Future[T]) -> None:
        loop.call_soon_threadsafe(_hand_on, done, waiting)

    work.add_done_callback(answered)
    return waiting


def _hand_on(done: Future[T], waiting: asyncio.Future[T]) -> None:
    if waiting.done():
        return
    error = done.exception()
    if error is None:
        waiting.set_result(done.result())
    else:
        waiting.set_exception(error)
