"""Settings of the SeaweedFS engine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl

from headrace.kvcache.store.base import StoreError

_ADDRESS = re.compile(r"[A-Za-z0-9._-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")
SCHEME = "seaweedfs"
TLS_SCHEME = "seaweedfs+tls"


@dataclass(frozen=True)
class TlsFiles:
    """PEM files for mutual TLS with all servers, HTTP and gRPC alike (L25)."""

    ca: str
    """Certificate of the authority that signed the servers' certificates."""
    cert: str
    """This process's certificate."""
    key: str

    def __post_init__(self) -> None:
        for name in (self.ca, self.cert, self.key):
            if not os.access(name, os.R_OK):
                raise StoreError(f"TLS file {name!r} of the SeaweedFS store cannot be read")


@dataclass(frozen=True)
class SeaweedSettings:
    """How to talk to one cluster. Every time is a bound on something that is waited for (L6)."""

    masters: tuple[str, ...]
    """`host:port` of every master's HTTP side; the first that answers is used."""
    tls: TlsFiles | None = None
    """None: plain HTTP and gRPC."""
    replication: str = "001"
    """SeaweedFS's three digits: further copies in other data centres, racks and servers. 001: two copies."""
    collection: str = "headrace"
    """First part of the names of collections; clusters that share SeaweedFS need different ones."""
    grow: int = 0
    """Volumes that the master makes when a collection needs room; 0: as many as it is configured to."""
    fsync: bool = True
    """A copy counts as written after its server's fsync, so that durable entries outlive a power cut of all copies."""
    queue_bytes: int = 256 << 20
    """Payload bytes accepted and not yet written; beyond it, puts are refused (L12)."""
    batch_entries: int = 64
    """Entries written under one assignment: one question to the master, one change of the index."""
    writers: int = 8
    """Uploads at a time."""
    readers: int = 16
    """Downloads at a time."""
    read_bytes: int = 256 << 20
    """Payload bytes that were read and not yet released; beyond it, reads wait a moment and then miss (BUSY)."""
    busy_wait_s: float = 0.05
    write_timeout_s: float = 10.0
    """From the first try of a batch until it is given up."""
    connect_timeout_s: float = 0.5
    read_attempt_s: float = 0.25
    """How long one copy may take before the other is asked as well as remembered to be slow."""
    lookup_s: float = 60.0
    """How long a volume's locations are believed without asking again; a failed read asks at once."""
    index_timeout_s: float = 2.0
    """Of one call of the index in the background; reads use their own deadline."""
    sweep_s: float = 60.0
    """Between passes that take expired rows out of the index."""

    def __post_init__(self) -> None:
        if not self.masters or not all(_ADDRESS.fullmatch(master) for master in self.masters):
            raise StoreError(f"masters of SeaweedFS {self.masters}: one or more host:port are needed")
        if not re.fullmatch(r"[0-2]{3}", self.replication):
            raise StoreError(f"replication {self.replication!r}: three digits from 0 to 2, such as 001")
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", self.collection):
            raise StoreError(f"collection {self.collection!r}: a lower-case name without underscore is needed")
        counts = (self.queue_bytes, self.batch_entries, self.writers, self.readers, self.read_bytes)
        times = (self.write_timeout_s, self.connect_timeout_s, self.read_attempt_s, self.lookup_s, self.sweep_s)
        if min(counts) < 1 or self.grow < 0 or min(times) <= 0 or self.index_timeout_s <= 0:
            raise StoreError("sizes, counts and times of the SeaweedFS store must be positive")

    @property
    def copies(self) -> int:
        """How many servers have a record."""
        return 1 + sum(int(digit) for digit in self.replication)


def parse_url(url: str) -> tuple[tuple[str, ...], TlsFiles | None]:
    """Masters and TLS files of `seaweedfs://host:port,host:port` or
    `seaweedfs+tls://host:port,host:port?ca=FILE&cert=FILE&key=FILE`. StoreError if it is not of that form."""
    scheme, separator, rest = url.partition("://")
    hosts, _, query = rest.partition("?")
    masters = tuple(part for part in hosts.rstrip("/").split(",") if part)
    if not separator or scheme not in (SCHEME, TLS_SCHEME) or not masters:
        raise StoreError(f"{url!r} is no URL of a SeaweedFS store: {SCHEME}://host:port,host:port")
    files = dict(parse_qsl(query, keep_blank_values=True))
    if scheme == SCHEME:
        if query:
            raise StoreError(f"{url!r}: {SCHEME}:// takes no query; with TLS the scheme is {TLS_SCHEME}")
        return SeaweedSettings(masters).masters, None
    if set(files) != {"ca", "cert", "key"}:
        raise StoreError(f"{url!r} needs ?ca=FILE&cert=FILE&key=FILE, all three and nothing else")
    return SeaweedSettings(masters).masters, TlsFiles(**files)
