"""Mutual TLS of one process: its certificate, who may sign others', and credentials that follow the files.

Certificates rotate without a restart. The files are looked at again before handshakes, at most once in
`tls.reload_seconds`: servers ask for them at every new connection, channels are made anew (rotating.py), HTTP servers
take the newest context. Connections that stand are not disturbed, and files that do not fit together (a rotation half
done) leave the former ones in force.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from headrace.services.runtime import logs
from headrace.services.runtime.files import Stamp, stamp_of
from headrace.services.runtime.settings import TlsSettings
from headrace.services.runtime.settings_load import SettingsError

_log = logs.get(__name__)


@dataclass(frozen=True)
class Material:
    """What the files said at one moment."""

    generation: int
    """Counts readings that changed something, from 1."""
    ca: bytes
    cert: bytes | None
    key: bytes | None = field(repr=False)
    context: ssl.SSLContext | None
    """Of HTTP servers: demands a certificate that `ca` signed. None without a certificate of our own."""


class Tls:
    """The material of one identity. Used from any thread: gRPC asks for it from its own."""

    def __init__(
        self,
        ca: Path,
        cert: Path | None,
        key: Path | None,
        *,
        server_name: str | None = None,
        reload_seconds: float = 1.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cert` and `key` may be missing for a client that shows none. Raises SettingsError for unusable files."""
        self.server_name = server_name
        """Name that servers' certificates must carry; None: the host that is dialled."""
        self._files = (ca, *((cert, key) if cert is not None and key is not None else ()))
        self.files = cert, key
        """Certificate and private key."""
        self._reload_seconds = reload_seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        try:
            self._stamp = self._look()
            self._material = self._read(1)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise SettingsError(f"tls: {_reason(error)} ({', '.join(map(str, self._files))})") from error
        self._looked = monotonic()

    @property
    def generation(self) -> int:
        """Of the material in force."""
        return self.current().generation

    def current(self) -> Material:
        """The material in force; looks at the files when that is due."""
        now = self._monotonic()
        if now - self._looked < self._reload_seconds:
            return self._material
        with self._lock:
            if now - self._looked >= self._reload_seconds:
                self._looked = now
                self._refresh()
        return self._material

    def server_credentials(self, *, client_certificates: bool = True) -> grpc.ServerCredentials:
        """Credentials of a listener. Without `client_certificates` none is asked for (the front door)."""
        given = self.current()
        last = given.generation

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC before each handshake; None: nothing changed."""
            nonlocal last
            material = self.current()
            if material.generation == last:
                return None
            last = material.generation
            return _configuration(material, client_certificates)

        first = _configuration(given, client_certificates)
        # The published stub lacks None, which gRPC documents as "no change".
        return grpc.dynamic_ssl_server_credentials(first, cast(Any, fetch), client_certificates)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a channel that is opened now."""
        material = self.current()
        return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)

    def _refresh(self) -> None:
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            material = self._read(self._material.generation + 1)
            if self._look() != stamp:
                return  # still being written; the next look sees the whole
        except (OSError, ssl.SSLError, ValueError) as error:
            _log.warning("new TLS files cannot be used; the former ones stay in force", error=_reason(error))
            return
        self._stamp, self._material = stamp, material
        _log.info("TLS files were read again", generation=material.generation)

    def _look(self) -> tuple[Stamp, ...]:
        return tuple(stamp_of(file) for file in self._files)

    def _read(self, generation: int) -> Material:
        """Raises OSError, ssl.SSLError (key and certificate are no pair), ValueError."""
        ca, *own = (file.read_bytes() for file in self._files)
        check = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        check.load_verify_locations(cadata=ca.decode("ascii"))
        if not own:
            return Material(generation, ca, None, None, None)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=ca.decode("ascii"))
        context.load_cert_chain(self._files[1], self._files[2], password=_no_password)
        return Material(generation, ca, own[0], own[1], context)


def open_tls(settings: TlsSettings) -> Tls | None:
    """The process's own material; None: plain text. Raises SettingsError."""
    if settings.ca is None:
        return None
    return Tls(
        settings.ca,
        settings.cert,
        settings.key,
        server_name=settings.server_name,
        reload_seconds=settings.reload_seconds,
    )


def _configuration(material: Material, client_certificates: bool) -> grpc.ServerCertificateConfiguration:
    if material.key is None or material.cert is None:
        raise SettingsError("tls: a server needs tls.cert and tls.key")
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.cert)], root_certificates=material.ca if client_certificates else None
    )


def _no_password() -> str:
    raise ValueError("the private key is encrypted; give one that is not, readable by this user alone")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else None) or str(
        error
    )
