"""Settings of a gateway process."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import ByteSize, Field, SecretStr, model_validator

from headrace.services.runtime.registry.base import Role
from headrace.services.runtime.settings import Section, ServiceSettings, is_loopback


class ModelEntry(Section):
    """One served model: a table of the list `gateway.models`."""

    name: str = Field(min_length=1)
    """What clients put into `model`."""
    router: str = Field(min_length=3)
    """host:port of its router."""
    folder: Path
    """The model's folder, of which tokenizer.json, config.json, generation_config.json and the chat template are
    read."""
    protocol: Literal["template", "v4.1"]
    """How conversations become prompts and tokens become answers: the folder's chat template, or DeepSeek's V4.1
    encoding."""
    router_model: str | None = None
    """The router's name of the model; default: `name`."""
    aliases: tuple[str, ...] = ()
    """Further names that clients may use."""
    thinking: bool = False
    """Whether requests that say nothing of it reason first (`v4.1` only)."""

    @model_validator(mode="after")
    def _no_template_thinks(self) -> Self:
        if self.thinking and self.protocol == "template":
            raise ValueError("thinking is of protocol v4.1; a template model's text is passed on as it is")
        return self


class GatewaySection(Section):
    """The HTTP side."""

    models: tuple[ModelEntry, ...] = ()
    """Served models, as JSON or [[gateway.models]] tables with name, router, folder, protocol and, if wanted,
    router_model, aliases, thinking (docs/gateway.md)."""
    keepalive_seconds: float = Field(default=10.0, gt=0)
    """A stream that has nothing to say for so long gets a comment, so that nothing on the way takes it for dead."""
    max_body_bytes: ByteSize = Field(default=ByteSize(64 * 1024 * 1024), ge=1024)
    """Largest request body."""
    read_seconds: float = Field(default=120.0, gt=0)
    """Longest wait for a request's headers, and then for its body."""
    max_requests: int = Field(default=1024, ge=1)
    """Requests served at once; more are refused with 429 and Retry-After (L12)."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Deadline of a request whose headers name none (L6)."""
    low_detail_tokens: int = Field(default=128, ge=1)
    """Most tokens of an image of `detail: low`."""
    connect_seconds: float = Field(default=10.0, gt=0)
    """Longest wait for a router's answer to a question that costs it nothing."""


class ResponsesSection(Section):
    """Stored responses, which `previous_response_id` continues. Bounded for each tenant."""

    redis: SecretStr | None = None
    """Redis that gateways share (`redis://…`, `rediss://…`, `unix://…`). Default: this process's memory, so another
    gateway, and this one after a restart, knows none of them."""
    prefix: str = "headrace:response:"
    """Of keys there."""
    per_tenant: int = Field(default=256, ge=0)
    """Responses kept for one tenant of one model; the oldest are forgotten. 0: none is."""
    max_bytes: ByteSize = Field(default=ByteSize(1024 * 1024), ge=1024)
    """Largest stored conversation; a longer one is answered and not stored, which its `store` then says."""
    max_tenants: int = Field(default=1024, ge=1)
    """Tenants with stored responses (in memory); those unused longest are forgotten."""
    memory_bytes: ByteSize = Field(default=ByteSize(1024 * 1024 * 1024), ge=1024)
    """Of all stored responses (in memory); above it the tenant that has most of it loses its oldest."""
    keep_seconds: int = Field(default=30 * 24 * 3600, ge=1)
    """How long a stored response is kept."""
    deadline_ms: int = Field(default=1000, ge=1)
    """Longest wait for Redis."""


class HttpsSection(Section):
    """HTTPS for clients. Files may be exchanged at any time."""

    cert: Path | None = None
    """Certificate that clients see, its chain behind it. Default: that of section tls, where there is one."""
    key: Path | None = None
    """Its private key."""
    off: bool = False
    """Plain HTTP although section tls is set: behind a proxy that ends TLS. Other machines can reach it only with
    listen.insecure_bind."""
    reload_seconds: float = Field(default=1.0, gt=0)
    """How often the files are looked at."""

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together; give both or none")
        return self


class GatewaySettings(ServiceSettings):
    """`headrace serve gateway`. Its `listen` is HTTP(S); `tls` is shown to the routers; it is no member of the registry
    and has no model section of its own."""

    ROLE: ClassVar[Role] = Role.GATEWAY

    gateway: GatewaySection = GatewaySection()
    responses: ResponsesSection = ResponsesSection()
    https: HttpsSection = HttpsSection()

    @property
    def https_files(self) -> tuple[Path, Path] | None:
        """Certificate and key that clients see; None: plain HTTP."""
        if self.https.off:
            return None
        if self.https.cert is not None and self.https.key is not None:
            return self.https.cert, self.https.key
        if self.tls.cert is not None and self.tls.key is not None:
            return self.tls.cert, self.tls.key
        return None

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [name for model in self.gateway.models for name in (model.name, *model.aliases)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"gateway.models: {', '.join(twice)} is named twice")
        return self

    @model_validator(mode="after")
    def _plain_text_stays_here(self) -> Self:
        """Instead of the base's: what other machines reach here is HTTP, whose certificate may be another one."""
        if self.https_files is None and not self.listen.insecure_bind and not is_loopback(self.listen.host):
            raise ValueError(
                f"listen.host {self.listen.host!r} can be reached from other machines in plain HTTP; "
                "set https.cert and https.key, bind 127.0.0.1, or set listen.insecure_bind=true"
            )
        return self
