"""Calls to one Redis server: pipelined, each within its deadline, and none while the server is known dead (L17)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from redis.backoff import NoBackoff
from redis.connection import Connection, parse_url
from redis.exceptions import AuthenticationError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from headrace.kvcache.index.base import IndexUnavailable
from headrace.kvcache.index.breaker import CircuitBreaker

Command = tuple[str | bytes | int, ...]

MIN_PATIENCE_S = 0.02
"""A call whose caller had less time left than this proves nothing about the server by timing out."""
MAX_PATIENCE_S = 2.0
"""No reply of a healthy server takes longer, whatever time the caller has: what a dead one costs, once."""


class RedisUrlError(ValueError):
    """The URL of the index cannot be used; the message says why, and never repeats a password."""


class RedisCalls:
    """A pool of connections to `url` (redis://, rediss://user:password@host:port/db?ssl_ca_certs=FILE, unix://).

    Thread-safe: every thread in a call has its own connection, and idle ones are kept for the next."""

    def __init__(self, url: str, *, breaker: CircuitBreaker, monotonic: Callable[[], float] = time.monotonic) -> None:
        try:
            options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise RedisUrlError(f"index URL: {error}") from None
        split = urlsplit(url)
        self.shown = f"{split.scheme}://{split.hostname or split.path}{f':{split.port}' if split.port else ''}"
        self._make: Callable[..., Connection] = options.pop("connection_class", Connection)
        # Retries are decided here, where the deadline is known.
        self._options = {"protocol": 2, "driver_info": None, **options, "retry": Retry(NoBackoff(), 0)}
        try:
            self._make(**self._options)
        except TypeError as error:
            raise RedisUrlError(f"index URL {self.shown}: an option after `?` does not fit: {error}") from None
        self._breaker = breaker
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False

    def one(self, command: Command, deadline: float) -> Any:
        """The reply to a single command."""
        return self.many([command], deadline)[0]

    def many(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """The replies, in order; all commands leave in one piece. Raises IndexUnavailable: the server is dead, slow,
        or refused one of them, in which case any of them may have been carried out."""
        patience = min(deadline - self._monotonic(), MAX_PATIENCE_S)
        if patience <= 0:
            raise IndexUnavailable(f"{self.shown}: no time was left to ask")
        if not self._breaker.allow():
            raise IndexUnavailable(f"{self.shown} did not answer a moment ago; it is asked again soon")
        try:
            replies = self._exchange(commands, self._monotonic() + patience)
        except AuthenticationError as error:
            self._breaker.failed()
            raise IndexUnavailable(f"{self.shown} refused user or password: {error}") from error
        except (RedisError, OSError) as error:
            if not isinstance(error, (TimeoutError, RedisTimeoutError)) or patience >= MIN_PATIENCE_S:
                self._breaker.failed()
                self._drop_idle()
            raise IndexUnavailable(f"{self.shown}: {error}") from error
        self._breaker.succeeded()
        for reply in replies:
            if isinstance(reply, ResponseError):
                if isinstance(reply, ReadOnlyError) or "READONLY" in str(reply):
                    # A primary that became a replica keeps its connections, and the address may be another's by now.
                    self._drop_idle()
                raise IndexUnavailable(f"{self.shown} refused: {reply}")
        return replies

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._drop_idle()

    def _exchange(self, commands: Sequence[Command], end: float) -> list[Any]:
        with self._connection(end) as connection:
            connection.send_packed_command(  # type: ignore[no-untyped-call]
                connection.pack_commands(commands),  # type: ignore[no-untyped-call]
                check_health=False,
            )
            return [self._reply(connection, end) for _ in commands]

    def _reply(self, connection: Connection, end: float) -> Any:
        left = max(0.001, end - self._monotonic())
        try:
            return connection.read_response(disable_decoding=True, timeout=left)
        except ResponseError as error:
            return error

    @contextmanager
    def _connection(self, end: float) -> Iterator[Connection]:
        """A connection that is not known to be broken. It goes back only after a whole exchange: one that was left
        in the middle would give its late replies to somebody else's commands."""
        connection = self._take_idle()
        try:
            left = max(0.001, end - self._monotonic())
            if connection is None:
                connection = self._make(**self._options, socket_timeout=left, socket_connect_timeout=left)
                connection.connect()  # type: ignore[no-untyped-call]
            connection.update_current_socket_timeout(left)
            yield connection
        except BaseException:
            if connection is not None:
                connection.disconnect()  # type: ignore[no-untyped-call]
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.disconnect()  # type: ignore[no-untyped-call]

    def _take_idle(self) -> Connection | None:
        while True:
            with self._lock:
                if self._closed:
                    raise IndexUnavailable("the index is closed")
                if not self._idle:
                    return None
                connection = self._idle.pop()
            try:
                if not connection.can_read(0):
                    return connection
            except (RedisError, OSError):  # closed by the server while it was idle
                pass
            connection.disconnect()  # type: ignore[no-untyped-call]

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()  # type: ignore[no-untyped-call]
