"""HTTP to the servers of a cluster: keep-alive connections, deadlines, a circuit breaker per server.

A dead server is found dead once: its breaker opens, and until the breaker lets one caller try again everybody else is
answered at once (L17). Errors are typed by what they mean for the caller: whether another copy may answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import cast

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
)

from headrace.kvcache.index.breaker import CircuitBreaker
from headrace.kvcache.store.seaweedfs.settings import TlsFiles

_PIECE = 256 << 10
"""Bytes between two looks at the deadline while a body comes in."""
_FORGET_S = 600.0
"""A server that was away for so long has left the cluster, as far as anybody here can tell."""
_OCTETS = {"Content-Type": "application/octet-stream", "Accept-Encoding": "identity"}


class ServerUnreachable(Exception):
    """No connection, it broke, or the breaker is open."""


class ServerTimeout(Exception):
    """No whole answer before the deadline."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes


class Servers:
    """Connections to all servers of a cluster, by `host:port`. Thread-safe."""

    def __init__(
        self, connections: int, connect_timeout_s: float, patience_s: float, tls: TlsFiles | None = None
    ) -> None:
        """`connections` are kept per server: at least as many as threads call at a time. `patience_s`: a server that
        had this long and did not answer is taken for dead; one that had less only came after the caller's deadline."""
        self._connections = connections
        self._connect_timeout_s = connect_timeout_s
        self._patience_s = patience_s
        self._tls = tls
        self._lock = threading.Lock()
        self._pools: dict[str, urllib3.HTTPConnectionPool] = {}
        self._breakers: dict[str, CircuitBreaker] = {}
        self._down_since: dict[str, float] = {}

    def up(self, server: str) -> bool:
        """Whether the last call to this server succeeded, as far as is known."""
        with self._lock:
            breaker = self._breakers.get(server)
        return breaker is None or not breaker.is_open

    def call(
        self,
        method: str,
        server: str,
        path: str,
        deadline: float,
        *,
        body: bytes | bytearray | None = None,
        head: int = 0,
    ) -> Reply:
        """One request; `head`: for the first so many bytes only. ServerUnreachable, ServerTimeout."""
        pool, breaker = self._of(server)
        if not breaker.allow():
            raise ServerUnreachable(f"{server} did not answer lately and is not asked again yet")
        began = time.monotonic()
        try:
            try:
                reply = self._exchange(pool, method, path, deadline, body, head)
            except ProtocolError:
                # A kept connection may have been closed by a server that is well: once more, on a fresh one.
                reply = self._exchange(pool, method, path, deadline, body, head)
        except (
            NewConnectionError,
            ProtocolError,
        ) as error:  # the first is a ConnectTimeoutError too: refused, not late
            breaker.failed()
            raise ServerUnreachable(f"{server} cannot be reached: {error}") from error
        except (ReadTimeoutError, ConnectTimeoutError, TimeoutError) as error:
            if time.monotonic() - began >= self._patience_s:
                breaker.failed()
            raise ServerTimeout(f"{server} did not answer {method} {path} in time") from error
        except HTTPError as error:
            breaker.failed()
            raise ServerUnreachable(f"{server} does not speak HTTP as expected: {error}") from error
        breaker.succeeded()
        return reply

    def probe(self, wait_s: float) -> None:
        """Ask servers that did not answer lately whether they do now, so that no request has to try them (L14)."""
        now = time.monotonic()
        with self._lock:
            down = [server for server, breaker in self._breakers.items() if breaker.is_open]
            self._down_since = {server: self._down_since.get(server, now) for server in down}
            for server, since in self._down_since.items():
                if now - since > _FORGET_S:
                    self._breakers.pop(server)
                    self._pools.pop(server).close()
        for server in down:
            if now - self._down_since[server] <= _FORGET_S:
                with contextlib.suppress(ServerUnreachable, ServerTimeout):
                    self.call("GET", server, "/status", time.monotonic() + wait_s)

    def close(self) -> None:
        with self._lock:
            pools = list(self._pools.values())
            self._pools.clear()
        for pool in pools:
            pool.close()

    def _of(self, server: str) -> tuple[urllib3.HTTPConnectionPool, CircuitBreaker]:
        with self._lock:
            pool = self._pools.get(server)
            if pool is None:
                pool = self._pools[server] = self._open(server)
            breaker = self._breakers.setdefault(server, CircuitBreaker())
            return pool, breaker

    def _open(self, server: str) -> urllib3.HTTPConnectionPool:
        host, _, port = server.rpartition(":")
        host = host.strip("[]")
        if self._tls is None:
            return urllib3.HTTPConnectionPool(host, int(port), maxsize=self._connections, retries=False)
        return urllib3.HTTPSConnectionPool(
            host,
            int(port),
            maxsize=self._connections,
            retries=False,
            cert_reqs="CERT_REQUIRED",
            ca_certs=self._tls.ca,
            cert_file=self._tls.cert,
            key_file=self._tls.key,
        )

    def _exchange(
        self,
        pool: urllib3.HTTPConnectionPool,
        method: str,
        path: str,
        deadline: float,
        body: bytes | bytearray | None,
        head: int,
    ) -> Reply:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        timeout = urllib3.Timeout(connect=min(self._connect_timeout_s, left), read=left)
        response = pool.urlopen(
            method,
            path,
            body=cast(bytes | None, body),
            headers=_OCTETS | {"Range": f"bytes=0-{head - 1}"} if head else _OCTETS,
            timeout=timeout,
            preload_content=False,
            redirect=False,
        )
        try:
            pieces = []
            while piece := response.read(_PIECE):
                pieces.append(piece)
                if time.monotonic() > deadline:
                    raise TimeoutError
            status = response.status
        except BaseException:
            response.close()  # the rest of the body would come with the next reply
            raise
        response.release_conn()
        return Reply(status, pieces[0] if len(pieces) == 1 else b"".join(pieces))
