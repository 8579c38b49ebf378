"""What a connection may hold of a client's bytes before it is ended (L12)."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from headrace.services.gateway.connections import MAX_HEAD_BYTES, BoundedHttp, bounded_by

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
PIECE = 16 * 1024


async def app(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Connection:
    """A protocol before a transport that keeps what is written."""

    def __init__(self) -> None:
        config = uvicorn.Config(app, log_config=None)
        config.load()
        loop = asyncio.get_running_loop()
        made: type[BoundedHttp] = bounded_by(60.0)
        self.protocol = made(config=config, server_state=ServerState(), app_state={}, _loop=loop)
        self.transport = Mock(**{"is_closing.return_value": False, "get_extra_info.return_value": None})
        self.protocol.connection_made(self.transport)

    def answered(self, first: bytes, piece: bytes) -> bytes:
        """What is written when pieces follow without end, but for sixteen times what is allowed."""
        self.protocol.data_received(first)
        for _ in range(16 * MAX_HEAD_BYTES // len(piece)):
            self.protocol.data_received(piece)
            if self.transport.close.called:
                break
        return b"".join(call.args[0] for call in self.transport.write.call_args_list)


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (HEAD + b"x: ", b"y" * PIECE),
        (HEAD, b"a: b\r\n" * (PIECE // 6)),
        (CHUNKED + b"2\r\n{}\r\n0\r\nx: ", b"y" * PIECE),
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * (PIECE // 6)),
        (CHUNKED + b"2;x=", b"y" * PIECE),
    ],
    ids=["header", "headers", "trailer", "trailers", "extension"],
)
async def test_what_has_no_end_is_ended(first: bytes, piece: bytes) -> None:
    """L12: of a head, of one trailer or many, and of an extension of a chunk."""
    connection = Connection()
    assert connection.answered(first, piece).startswith(b"HTTP/1.1 431")
    connection.protocol.connection_lost(None)


@pytest.mark.parametrize(
    ("first", "piece"),
    [(HEAD + b"content-length: 1000000000\r\n\r\n", b"y" * PIECE), (CHUNKED, b"1\r\ny\r\n" * (PIECE // 6))],
    ids=["plain", "chunked"],
)
async def test_a_body_is_bounded_elsewhere(first: bytes, piece: bytes) -> None:
    """Where it is read."""
    connection = Connection()
    assert connection.answered(first, piece) == b""
    connection.protocol.connection_lost(None)
