"""API keys and what their tenants may do: the document that `headrace keys` writes and routers follow.

A key is `hr_ID_SECRET`. The id is no secret: it finds the record and stands in lists and logs. The secret has 256
random bits, so one SHA-256 of the whole key is enough to keep at rest: there is nothing to guess that a slow hash would
protect, and a router checks one at every call.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

PREFIX: Final = "hr_"
NEVER: Final = "0" * 64
"""A digest that no key has; unknown ids are compared with it, so that the time says nothing."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]
KeyId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]


class KeyRole(StrEnum):
    """What a key's holder is."""

    TENANT = "tenant"
    """Sends requests."""
    OPERATOR = "operator"
    """Manages the cluster; is no tenant."""


class TenantLimits(BaseModel):
    """What a tenant's requests are and may be. Limits without a value do not limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sharing_domain: str = Field(default="", max_length=64)
    """Tenants of one domain share prefixes and images; empty: the tenant shares with nobody."""
    traffic_class: Literal["agent", "chat", "batch"] = "chat"
    """Of requests that name none."""
    max_priority: int = 0
    """Highest priority that its requests may ask for."""
    requests_per_second: float | None = Field(default=None, gt=0)
    """Over all routers; bursts of ten seconds' worth pass."""
    tokens_per_second: float | None = Field(default=None, gt=0)
    """Prompt and output together, over all routers; bursts of ten seconds' worth pass."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Requests at once, over all routers."""


class KeyRecord(BaseModel):
    """One key at rest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: KeyId
    digest: Digest
    """SHA-256 of the whole key, in hexadecimal digits."""
    role: KeyRole
    name: Name
    """The tenant, or the operator."""
    created: float
    """Wall clock, in seconds, as the other times."""
    expires: float | None = None
    revoked: float | None = None

    def usable(self, now: float) -> bool:
        """Neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or now < self.expires)

    def state(self, now: float) -> str:
        """`valid`, `expired` or `revoked`."""
        if self.revoked is not None:
            return "revoked"
        return "valid" if self.usable(now) else "expired"


class KeysDocument(BaseModel):
    """Everything in a store of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    tenants: Mapping[Name, TenantLimits] = Field(default_factory=dict)
    """Tenants of tokens may stand here, too, without a key."""
    keys: tuple[KeyRecord, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len({key.id for key in self.keys}) < len(self.keys):
            raise ValueError("two keys have one id")
        return self

    def with_key(self, key: KeyRecord, limits: TenantLimits | None = None) -> KeysDocument:
        """One more key; `limits` become those of its tenant, None leaves them."""
        tenants = dict(self.tenants)
        if key.role is KeyRole.TENANT:
            tenants[key.name] = limits or tenants.get(key.name) or TenantLimits()
        return KeysDocument(tenants=tenants, keys=(*self.keys, key))

    def without(self, key_id: str, now: float) -> KeysDocument:
        """The key is revoked; its record stays, so that it is told from one that never was. Raises KeyError."""
        if all(key.id != key_id for key in self.keys):
            raise KeyError(key_id)
        keys = tuple(
            key.model_copy(update={"revoked": now}) if key.id == key_id and key.revoked is None else key
            for key in self.keys
        )
        return KeysDocument(tenants=self.tenants, keys=keys)


def mint(role: KeyRole, name: str, *, seconds: float | None = None) -> tuple[str, KeyRecord]:
    """A new key, to be shown once, and its record. `seconds`: how long it is good; None: until revoked.

    Raises pydantic.ValidationError for a name that is none.
    """
    key_id = secrets.token_hex(6)
    key = f"{PREFIX}{key_id}_{secrets.token_urlsafe(32)}"
    now = time.time()
    expires = None if seconds is None else now + seconds
    return key, KeyRecord(id=key_id, digest=digest_of(key), role=role, name=name, created=now, expires=expires)


def digest_of(key: str | bytes) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def key_id(key: bytes) -> str | None:
    """The id in a key of this form; None for another form."""
    if not key.startswith(PREFIX.encode()):
        return None
    return key[len(PREFIX) :].partition(b"_")[0].decode("ascii", "replace")
