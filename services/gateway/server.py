"""The HTTP(S) listener: uvicorn inside this process's own life."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from headrace.services.gateway.connections import bounded_by
from headrace.services.runtime import logs
from headrace.services.runtime.files import Stamp, stamp_of, write_whole
from headrace.services.runtime.settings import ListenSettings
from headrace.services.runtime.settings_load import SettingsError

_log = logs.get(__name__)
BACKLOG: Final = 2048


class HttpsFiles:
    """One context for the life of the listener: handshakes from a change of the files on show the new certificate,
    connections that stand are not disturbed, and files that do not fit together leave the former in force."""

    def __init__(self, cert: Path, key: Path, reload_s: float) -> None:
        """Raises SettingsError for unusable files."""
        self._cert, self._key, self._reload_s = cert, key, reload_s
        self.context = _context()
        try:
            self._stamp = self._look()
            self._load()
        except (OSError, ssl.SSLError, ValueError) as error:
            raise SettingsError(f"https: {error} ({cert}, {key})") from error

    async def follow(self) -> None:
        """Keep up with the files for ever; a background task."""
        while True:
            await asyncio.sleep(self._reload_s)
            try:
                stamp = self._look()
                if stamp != self._stamp:
                    self._load()
                    self._stamp = stamp
                    _log.info("HTTPS files were read again")
            except (OSError, ssl.SSLError, ValueError) as error:
                _log.warning("new HTTPS files cannot be used; the former ones stay in force", error=str(error))

    def _look(self) -> tuple[Stamp, Stamp]:
        return stamp_of(self._cert), stamp_of(self._key)

    def _load(self) -> None:
        """Into a context of its own first: a pair that does not fit must not touch the one in use."""
        _context().load_cert_chain(self._cert, self._key, password=_no_password)
        self.context.load_cert_chain(self._cert, self._key, password=_no_password)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _no_password() -> str:
    raise ValueError("the private key is encrypted; give one that is not, readable by this user alone")


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the Lifecycle's."""
        yield


class HttpServer:
    """Bound when it is made, so that a taken address is told at once."""

    def __init__(self, app: ASGIApp, listen: ListenSettings, files: HttpsFiles | None, read_s: float) -> None:
        """`read_s`: longest wait for a request's head. Raises OSError when the address is taken."""
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        self._socket = socket.create_server((listen.host, listen.port), family=family, backlog=BACKLOG)
        port = int(self._socket.getsockname()[1])
        self.address = f"[{listen.host}]:{port}" if ":" in listen.host else f"{listen.host}:{port}"
        self._listen = listen
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            ws="none",
            http=bounded_by(read_s),
            timeout_keep_alive=75,
        )
        config.load()
        if files is not None:
            config.ssl = files.context
        self._server = _Server(config)

    async def serve(self) -> None:
        """Until `stop`. A background task."""
        if self._listen.address_file is not None:
            write_whole(self._listen.address_file, f"{self.address}\n".encode(), 0o666)
        _log.info("listening", address=self.address)
        await self._server.serve(sockets=[self._socket])

    async def stop(self) -> None:
        """Take no more connections and close those that are idle."""
        self._server.should_exit = True
        self._server.force_exit = True
