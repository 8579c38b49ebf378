"""uvicorn's connection, with an end to patience and to memory: a request's head has to come whole within a time, and
within a length. Its body is bounded where it is read (door.py)."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of request line and headers, and of trailers behind a body."""
_TOO_LONG: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """Belongs to the event loop's thread; `bounded_by` makes the classes that are used."""

    read_s: ClassVar[float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: asyncio.TimerHandle | None = None
        self._held_bytes = 0
        """Since the parser has last passed anything on: of a head, of trailers, or between two pieces of a body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A head is due from here on."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is due any more."""
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts what the parser may hold; what comes in one read with an end of that is not counted."""
        self._held_bytes += len(data)
        super().data_received(data)
        if self._held_bytes > MAX_HEAD_BYTES:
            self._end(_TOO_LONG)

    def on_message_begin(self) -> None:
        """Of each request on the connection."""
        super().on_message_begin()
        self._held_bytes = 0
        self._await_head()

    def on_headers_complete(self) -> None:
        """The body is the request's own matter."""
        self._held_bytes = 0
        self._head_is_there()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of it."""
        self._held_bytes = 0
        super().on_body(body)

    def _await_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.read_s, self._is_late)

    def _head_is_there(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _is_late(self) -> None:
        self._late = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # of a request behind one that is being answered, which may have stopped the reading
        else:
            self._end(_TOO_SLOW)

    def _end(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()


def bounded_by(read_s: float) -> type[BoundedHttp]:
    """The connections of a listener that waits so many seconds for a head."""
    return type("BoundedHttp", (BoundedHttp,), {"read_s": read_s})
