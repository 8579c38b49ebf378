"""A TCP proxy in front of one process, which can spoil what passes it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from enum import StrEnum

CHUNK = 65536
_LINGER_RESET = struct.pack("ii", 1, 0)


class Spoil(StrEnum):
    """What it does to connections, old and new, until it is healed."""

    NOTHING = "nothing"
    DELAY = "delay"
    """Every piece waits."""
    DROP = "drop"
    """What is sent is thrown away; a connection that lost something is reset at the end."""
    TRUNCATE = "truncate"
    """Half of the next piece passes, then the connection is closed."""
    HALF_CLOSE = "half_close"
    """One side is told that the other sends no more; what comes the other way passes."""
    RESET = "reset"
    """All connections are reset at once, and new ones when they send."""


class _Link:
    """One client's connection and its way on."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.writers = (client, server)
        self.spoilt = False
        self.closed_ways: set[bool] = set()

    def reset(self) -> None:
        for writer in self.writers:
            reset(writer)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the other side sees an error and not an end."""
    found = writer.get_extra_info("socket")
    if found is not None:
        with contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
    writer.transport.abort()


class Proxy:
    """Listens on `port` (0 until it is started) and passes everything on to `target`, a port of this machine."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.spoil = Spoil.NOTHING
        self.delay_s = 0.0
        self.towards_server = True
        """Which way is cut by HALF_CLOSE."""
        self.hurt = 0
        """Connections that were spoilt."""
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def begin(self, spoil: Spoil, *, delay_s: float = 0.0, towards_server: bool = True) -> None:
        self.spoil, self.delay_s, self.towards_server = spoil, delay_s, towards_server
        if spoil is Spoil.RESET:
            for link in list(self._links):
                self._spoilt(link)
                link.reset()
        if spoil is Spoil.HALF_CLOSE:
            for link in list(self._links):
                self._half_close(link)

    def heal(self) -> None:
        """Let everything pass again. Connections that lost bytes end here: nobody could go on with them."""
        spoil, self.spoil = self.spoil, Spoil.NOTHING
        for link in list(self._links):
            if link.spoilt and spoil is not Spoil.DELAY:
                link.reset()

    # --- inside ------------------------------------------------------------------------------------------------

    def _spoilt(self, link: _Link) -> None:
        self.hurt += not link.spoilt
        link.spoilt = True

    def _half_close(self, link: _Link) -> None:
        self._spoilt(link)
        link.closed_ways.add(self.towards_server)
        writer = link.writers[self.towards_server]
        if not writer.is_closing() and writer.can_write_eof():
            writer.write_eof()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        finally:
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward_reader, onward = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:  # nobody listens there now
            reset(writer)
            return
        link = _Link(writer, onward)
        self._links.add(link)
        ways = (
            asyncio.create_task(self._pump(link, reader, onward, towards_server=True)),
            asyncio.create_task(self._pump(link, onward_reader, writer, towards_server=False)),
        )
        try:
            await asyncio.gather(*ways)
        except OSError:  # one side was reset: so is the other
            link.reset()
        finally:
            for way in ways:
                way.cancel()
            self._links.discard(link)
            for each in link.writers:
                each.close()

    async def _pump(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, towards_server: bool
    ) -> None:
        while data := await reader.read(CHUNK):
            if towards_server in link.closed_ways:
                continue
            if self.spoil is Spoil.DELAY:
                self._spoilt(link)
                await asyncio.sleep(self.delay_s)
            elif self.spoil is Spoil.DROP:
                self._spoilt(link)
                continue
            elif self.spoil is Spoil.TRUNCATE:
                self._spoilt(link)
                writer.write(data[: len(data) // 2])
                for each in link.writers:
                    each.close()
                return
            elif self.spoil is Spoil.RESET:
                self._spoilt(link)
                link.reset()
                return
            elif self.spoil is Spoil.HALF_CLOSE and towards_server is self.towards_server:
                self._half_close(link)
                continue
            writer.write(data)
            await writer.drain()
        if towards_server not in link.closed_ways and not writer.is_closing() and writer.can_write_eof():
            writer.write_eof()
