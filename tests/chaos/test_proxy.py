"""The proxy does to a connection what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.proxy import Proxy, Spoil

PATIENCE_S = 60.0


class Echo:
    """Answers every piece with itself, twice; behind a proxy."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        """Some client has said that it sends no more, or is gone."""
        self.server: asyncio.Server
        self.proxy: Proxy

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1000):
                writer.write(data * 2)
        except OSError:
            pass
        finally:
            self.ended.set()
            writer.close()


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[Echo]:
    site = Echo()
    site.server = await asyncio.start_server(site.serve, "127.0.0.1", 0)
    site.proxy = Proxy(site.server.sockets[0].getsockname()[1])
    await site.proxy.start()
    yield site
    await site.proxy.close()
    site.server.close()


async def connect(echo: Echo) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has worked."""
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.proxy.port)
    writer.write(b"ab")
    assert await asyncio.wait_for(reader.readexactly(4), PATIENCE_S) == b"abab"
    return reader, writer


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the end. Raises ConnectionResetError."""
    return await asyncio.wait_for(reader.read(), PATIENCE_S)


async def test_it_passes_on_what_comes_and_what_ends(echo: Echo) -> None:
    reader, writer = await connect(echo)
    writer.write_eof()
    assert await rest(reader) == b""
    assert echo.proxy.hurt == 0


async def test_reset(echo: Echo) -> None:
    reader, _ = await connect(echo)
    echo.proxy.begin(Spoil.RESET)
    with pytest.raises(ConnectionResetError):
        await rest(reader)
    assert echo.proxy.hurt == 1


async def test_delay(echo: Echo) -> None:
    reader, writer = await connect(echo)
    echo.proxy.begin(Spoil.DELAY, delay_s=0.2)
    before = asyncio.get_running_loop().time()
    writer.write(b"c")
    assert await asyncio.wait_for(reader.readexactly(2), PATIENCE_S) == b"cc"
    assert asyncio.get_running_loop().time() - before >= 0.4, "there and back"
    echo.proxy.heal()
    writer.write(b"d")
    assert await asyncio.wait_for(reader.readexactly(2), PATIENCE_S) == b"dd"


async def test_drop(echo: Echo) -> None:
    reader, writer = await connect(echo)
    echo.proxy.begin(Spoil.DROP)
    writer.write(b"c")
    async with asyncio.timeout(PATIENCE_S):
        while not echo.proxy.hurt:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    echo.proxy.heal()
    with pytest.raises(ConnectionResetError):
        await rest(reader)


async def test_truncate(echo: Echo) -> None:
    reader, writer = await connect(echo)
    echo.proxy.begin(Spoil.TRUNCATE)
    writer.write(b"cdef")
    assert len(await rest(reader)) < 8
    await asyncio.wait_for(echo.ended.wait(), PATIENCE_S)


@pytest.mark.parametrize("towards_server", [True, False])
async def test_half_close(echo: Echo, towards_server: bool) -> None:
    reader, _ = await connect(echo)
    echo.proxy.begin(Spoil.HALF_CLOSE, towards_server=towards_server)
    if towards_server:
        await asyncio.wait_for(echo.ended.wait(), PATIENCE_S)
    assert await rest(reader) == b""


async def test_nobody_listens(echo: Echo) -> None:
    echo.server.close()
    await echo.server.wait_closed()
    reader, _ = await asyncio.open_connection("127.0.0.1", echo.proxy.port)
    with pytest.raises(ConnectionResetError):
        await rest(reader)
