"""The certificate that commands show to a cluster with TLS, and whose certificates they believe."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from headrace.cli.certificates import files_of
from headrace.cli.exits import CliError
from headrace.cli.state import cluster_of

ENV_IDENTITY: Final = "HEADRACE_IDENTITY"
"""FOLDER/NAME: ca.crt, NAME.crt and NAME.key of FOLDER, as `headrace certs` makes them. A folder that ends in / has an
authority alone: no certificate is shown (the front door)."""
TLS_FOLDER: Final = "tls"
"""Of a run directory: where `headrace up --tls` keeps its authority."""
OPERATOR: Final = "operator"
"""Name of the launcher's own certificate."""


@dataclass(frozen=True)
class ClientTls:
    """PEM files."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    def open(self, address: str, options: list[tuple[str, int]]) -> grpc.Channel:
        """A channel. The server's certificate must carry the host that is dialled. Raises CliError for a file that
        cannot be read."""
        try:
            credentials = grpc.ssl_channel_credentials(
                self.ca.read_bytes(),
                None if self.key is None else self.key.read_bytes(),
                None if self.cert is None else self.cert.read_bytes(),
            )
        except OSError as error:
            raise CliError(f"cannot read {error.filename}: {error.strerror}; see {ENV_IDENTITY}") from error
        return grpc.secure_channel(address, credentials, options=options)


def identity(folder: Path, name: str = OPERATOR) -> ClientTls:
    """An identity of an authority's folder."""
    files = files_of(folder, name)
    if not name:
        return ClientTls(files.ca)
    return ClientTls(files.ca, files.cert, files.key)


def client_tls(router: str) -> ClientTls | None:
    """How to speak to a router: $HEADRACE_IDENTITY, else what this user's running cluster made; None: plain text."""
    if given := os.environ.get(ENV_IDENTITY):
        folder, _, name = given.rpartition("/")
        return identity(Path(folder or "."), name)
    cluster = cluster_of(router)
    if cluster is None:
        return None
    made = Path(cluster.run_dir) / TLS_FOLDER
    return identity(made) if files_of(made, OPERATOR).cert.is_file() else None
