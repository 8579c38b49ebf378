"""Where asyncio meets the engine thread: commands go in and are awaited, events of a turn come out on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from headrace.engine.core import Engine
from headrace.engine.messages import Command, Event, ReplyT
from headrace.engine.worker import EngineWorker
from headrace.services.runtime import logs
from headrace.services.worker.waits import waiting_for

_log = logs.get(__name__)


class EngineLink:
    """One engine on its thread, as RPC code sees it. Made and used on the event loop's thread."""

    def __init__(self, engine: Engine, on_events: Callable[[tuple[Event, ...]], None], *, threads: int) -> None:
        """`on_events` is called on the loop with all events of one turn of the engine, in order."""
        self._loop = asyncio.get_running_loop()
        self._on_events = on_events
        self._worker = EngineWorker(engine, self._outbox, threads=threads)

    @property
    def alive(self) -> bool:
        """The engine thread runs."""
        return self._worker.alive

    def start(self) -> None:
        self._worker.start()

    async def stop(self) -> None:
        """End what lives; its terminal events are delivered before this returns. Idempotent."""
        await asyncio.to_thread(self._worker.stop)
        # Events handed over with call_soon_threadsafe before the thread ended stand in the loop's queue before us.
        await asyncio.sleep(0)

    async def call(self, command: Command[ReplyT]) -> ReplyT:
        """The engine's answer, at most one step late. Raises EngineError.

        Cancelling the wait does not recall the command: whoever cancels a Reserve or Prefill cancels the request too.
        """
        return await self.ask(command)

    def ask(self, command: Command[ReplyT]) -> asyncio.Future[ReplyT]:
        """Put a command into the inbox now; await the answer later. Commands are taken in this order."""
        return waiting_for(self._worker.call(command))

    def submit(self, command: Command[ReplyT]) -> Future[ReplyT]:
        """Put a command into the inbox from any thread; its future is answered on the engine's."""
        return self._worker.call(command)

    def post(self, command: Command[ReplyT]) -> None:
        """Send a command whose answer nobody needs; a refusal is logged."""

        def told(done: Future[ReplyT]) -> None:
            error = done.exception()
            if error is not None:
                _log.warning("command refused", command=type(command).__name__, error=str(error))

        self._worker.call(command).add_done_callback(told)

    def _outbox(self, events: tuple[Event, ...]) -> None:
        """On the engine thread."""
        self._loop.call_soon_threadsafe(self._on_events, events)
