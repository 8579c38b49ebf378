"""Server-sent events to one client: never silent for long, over when the client leaves (L6, L10)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.services.runtime import logs
from headrace.services.runtime.errors import Cancelled, HeadraceError, Internal

T = TypeVar("T")
Frames = AsyncGenerator[bytes, None]
Told = Callable[[HeadraceError], bytes]
"""An error in the middle of a stream, as frames of the API."""
COMMENT: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
"""The end of a stream for OpenAI's clients."""
_log = logs.get(__name__)


def frame(document: str | dict[str, Any], event: str | None = None) -> bytes:
    """One event; `document` is JSON or becomes it."""
    text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {event}\ndata: {text}\n\n" if event else f"data: {text}\n\n").encode()


async def until_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: Cancelled is raised then."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise Cancelled("the client left")
    finally:
        await end(doing, leaving)


async def disconnected(receive: Receive) -> None:
    """Waits for the client's leaving; what it sends meanwhile is read and dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs, and wait until it has given everything back."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A stream whose first frame is there, or that has kept its client waiting long enough to begin without."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[bytes],
        frames: Frames,
        told: Told,
        keepalive_s: float,
        comment: bytes = COMMENT,
    ) -> None:
        """`first` may still be awaited; `frames` are what follows it. This object owns both."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._frames = frames
        self._told = told
        self._keepalive_s = keepalive_s
        self._comment = comment
        self._sent_at = 0.0
        self.failure: BaseException | None = None
        """What ended the stream early."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the end or the client's leaving. A slow reader is waited for, and the router with it."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        living = asyncio.ensure_future(self._live(send))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            else:
                self.failure = Cancelled("the client left")
        finally:
            await end(writing, leaving, living, self._first)
            await self._frames.aclose()

    async def _write(self, send: Send) -> None:
        try:
            await self._body(send, await self._first)
            async with aclosing(self._frames) as frames:
                async for each in frames:
                    await self._body(send, each)
        except HeadraceError as error:
            self.failure = error
            await self._body(send, self._told(error))
        except Exception as error:  # noqa: BLE001 - the boundary of a request (L13)
            self.failure = error
            _log.error("a stream failed", exc_info=error)
            await self._body(send, self._told(Internal("an internal error ended the answer; repeat the request")))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _body(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_at = asyncio.get_running_loop().time()

    async def _live(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent_at = self._sent_at or loop.time()
        while True:
            await asyncio.sleep(self._sent_at + self._keepalive_s - loop.time())
            if loop.time() - self._sent_at >= self._keepalive_s:
                await self._body(send, self._comment)


async def begun(frames: Frames, receive: Receive, keepalive_s: float) -> asyncio.Future[bytes]:
    """The first frame, or a promise of it after `keepalive_s`. Raises what came instead, Cancelled when the client
    left."""

    async def one() -> bytes:
        async for each in frames:
            return each
        raise Internal("the answer is empty; repeat the request")

    first: asyncio.Future[bytes] = asyncio.ensure_future(one())
    leaving = asyncio.ensure_future(disconnected(receive))
    try:
        watched: set[asyncio.Future[Any]] = {first, leaving}
        await asyncio.wait(watched, timeout=keepalive_s, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done() and not first.done():
            raise Cancelled("the client left")
        if first.done():
            first.result()
    except BaseException:
        await end(first, leaving)
        await frames.aclose()
        raise
    await end(leaving)
    return first
