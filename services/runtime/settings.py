"""One typed settings object per process.

Sources, the first that names a key wins: flags (`--set section.field=value`), environment
(`HEADRACE_SECTION__FIELD`), a TOML file (`--config FILE`), defaults. The defaults alone make a working local
process. An unknown key is an error wherever it stands. See settings_load.py for the merge and settings_docs.py for
the documentation, which is rendered from the docstrings below.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from headrace.services.runtime.registry.base import Role


def is_loopback(host: str) -> bool:
    """Whether binding `host` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Section(BaseModel):
    """Base of every group of settings: immutable, unknown keys refused, each field documented by its docstring."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class ListenSettings(Section):
    """Where the gRPC server listens."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs TLS (section tls) or insecure_bind."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    advertise: str | None = None
    """host:port that peers are told to use; default: the bound address."""
    address_file: Path | None = None
    """File that gets the bound host:port once the port answers (whole or not at all), for whoever started the process
    with port 0."""
    insecure_bind: bool = False
    """Allow a plain-text listener that other machines can reach. Every caller is then the tenant `default`, or names
    itself by an API key that travels in plain text (router.tenants)."""


class FrontSettings(Section):
    """One more port of the router, for clients without a certificate of the cluster: InferenceService and health alone,
    over TLS where section tls is set. Callers say who they are by API key or token."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int | None = Field(default=None, ge=0, le=65535)
    """Port to bind; 0 takes a free one. Default: there is no such port, and clients need certificates."""
    address_file: Path | None = None
    """File that gets the bound host:port, as listen.address_file."""


class TlsSettings(Section):
    """Mutual TLS on every port and channel of the process (SECURITY.md). Files are PEM and may be exchanged at any
    time; `headrace certs` makes them. All processes of a cluster have it, or none."""

    ca: Path | None = None
    """Authorities whose certificates are believed, of clients and servers alike. Setting it turns TLS on."""
    cert: Path | None = None
    """This process's certificate, its chain behind it; one URI in it says role and replica
    (`headrace://decode/decode-0`)."""
    key: Path | None = None
    """Its private key, not encrypted; readable by this user alone."""
    server_name: str | None = None
    """Name that the certificates of all servers of the cluster carry, where addresses change too often to stand in
    them. Default: the host that is dialled must stand in the certificate."""
    reload_seconds: float = Field(default=1.0, ge=0)
    """The files are looked at again before a handshake, at most once in this time."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len({self.ca is None, self.cert is None, self.key is None}) > 1:
            raise ValueError("ca, cert and key belong together; give all three or none")
        return self

    @property
    def on(self) -> bool:
        """There is TLS."""
        return self.ca is not None


class RegistrySettings(Section):
    """How replicas find each other."""

    kind: Literal["embedded", "etcd"] = "embedded"
    """`embedded` lives in the router process (one machine); `etcd` is a cluster of its own."""
    address: str = "127.0.0.1:7411"
    """host:port of the router (embedded), or host:port of etcd servers, separated by commas."""
    prefix: str = "/headrace/"
    """Key prefix in etcd; clusters that share an etcd differ in it."""
    ttl_seconds: float = Field(default=5.0, ge=0.2, le=120)
    """Life of a membership lease without renewal; renewed every third of it (L8). etcd rounds up to seconds."""
    etcd_ca: Path | None = None
    """Authorities of etcd's certificates (PEM); with it etcd is spoken to over TLS."""
    etcd_cert: Path | None = None
    """Certificate shown to etcd; default: that of section tls."""
    etcd_key: Path | None = None
    """Its private key."""

    @model_validator(mode="after")
    def _etcd_pair(self) -> Self:
        if (self.etcd_cert is None) != (self.etcd_key is None):
            raise ValueError("etcd_cert and etcd_key belong together; give both or none")
        return self


class ModelSettings(Section):
    """Which model the process serves."""

    folder: Path | None = None
    """Hugging Face folder: config.json, tokenizer.json, safetensors. Needed by every role that runs a model."""
    name: str = Field(default="default", min_length=1, pattern=r"^[^/]+$")
    """Name under which the model is served; replicas of one name must have equal fingerprints (L14)."""


class LogSettings(Section):
    """Structured logs on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is written."""
    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: console on a terminal, JSON lines otherwise."""


class MetricsSettings(Section):
    """Prometheus metrics over HTTP at /metrics: HTTPS for certificates of role monitor, operator or router where TLS is
    on, else loopback only unless listen.insecure_bind."""

    enabled: bool = True
    """Whether the endpoint exists."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 takes a free one, which is logged at start."""


class RpcSettings(Section):
    """Limits of gRPC, the same for servers and channels of a process."""

    max_message_bytes: ByteSize = Field(default=ByteSize(64 * 1024 * 1024), ge=64 * 1024, le=2**31 - 1)
    """Largest message sent or received, at both ends; told to clients by ListModels."""
    keepalive_seconds: float = Field(default=20.0, ge=1)
    """Interval of HTTP/2 pings on idle channels, so that a dead host is noticed."""


class StopSettings(Section):
    """How the process ends."""

    drain_seconds: float = Field(default=30.0, ge=0)
    """Longest wait for running requests after the first signal (L19); a second signal ends the wait."""
    close_seconds: float = Field(default=10.0, gt=0)
    """Longest time to release resources after draining; then the process is ended hard (L6)."""
    parent_pid: int | None = Field(default=None, ge=1)
    """Stop when this process, which must be the parent, ends. Set by `headrace up` for its children."""


class ServiceSettings(Section):
    """What every service has; each role extends it. `ROLE` names the table [roles.ROLE] of a shared file."""

    ROLE: ClassVar[Role]

    replica_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._\-]{1,64}$")
    """Stable name of this replica; default: role, host name and a random suffix."""
    data_centre: str = "local"
    """Where the replica stands, for topology-aware choices."""
    host_name: str = Field(default_factory=socket.gethostname)
    """Which machine it is on; equal names may use same-host transports."""
    listen: ListenSettings = ListenSettings()
    registry: RegistrySettings = RegistrySettings()
    model: ModelSettings = ModelSettings()
    log: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    rpc: RpcSettings = RpcSettings()
    stop: StopSettings = StopSettings()
    tls: TlsSettings = TlsSettings()

    @model_validator(mode="after")
    def _plain_text_stays_here(self) -> Self:
        if self.tls.on or self.listen.insecure_bind:
            return self
        if not is_loopback(self.listen.host):
            raise ValueError(
                f"listen.host {self.listen.host!r} can be reached from other machines in plain text; "
                "set tls.ca, tls.cert and tls.key, bind 127.0.0.1, or set listen.insecure_bind=true"
            )
        if self.metrics.enabled and not is_loopback(self.metrics.host):
            raise ValueError(
                "metrics.host is not loopback: set section tls, listen.insecure_bind=true or bind 127.0.0.1"
            )
        return self
