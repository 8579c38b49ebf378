"""Who calls, and what is derived for a tenant: the name comes from the credential, never from the request (L25).

`router.tenants` names a TOML file, read once at start:

    [tenants.acme]
    keys = ["<SHA-256 of an API key, 64 hexadecimal digits>"]
    sharing_domain = "acme-group"     # optional: tenants of one domain share prefixes and images
    traffic_class = "agent"           # optional: class of requests that name none (agent, chat, batch)
    max_priority = 0                  # optional: highest priority that its requests may ask for

    [operators.alice]
    keys = ["…"]                      # may manage the cache through this router

A call brings `authorization: Bearer KEY` as gRPC metadata. Keys are compared by digest, all of them, in constant time.
Without a file everybody is the tenant `default` and may operate, which is right for a machine of one's own.
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from headrace.kvcache.keys import tenant_salt
from headrace.services.runtime.errors import NotFound, PermissionDenied, Unauthenticated
from headrace.services.runtime.settings_load import SettingsError
from headrace.v1 import common_pb2

TENANT: Final = "default"
"""Every caller's tenant while there is no authentication (spec/protocol.md, Identity)."""
LAUNCHER: Final = "launcher"
"""The operator who started the router, as logs name it."""
METADATA_KEY: Final = "authorization"
_CLASSES: Final = {
    "agent": common_pb2.TRAFFIC_CLASS_AGENT,
    "chat": common_pb2.TRAFFIC_CLASS_CHAT,
    "batch": common_pb2.TRAFFIC_CLASS_BATCH,
}
_NO_KEY: Final = "no valid API key; send it as metadata `authorization: Bearer KEY`"


class TenantKeys:
    """What is derived from the salt secret for one tenant (L25). Only the router can make these."""

    def __init__(self, secret: bytes, tenant: str, sharing_domain: str = "") -> None:
        """Members of a sharing domain have the domain's salt, and each its own tag for quotas and erasure."""
        self.salt = tenant_salt(secret, "" if sharing_domain else tenant, sharing_domain)
        self.image_key = hmac.digest(self.salt, b"headrace.image-key.1", "sha256")
        self.tag = tenant_tag(secret, tenant)


def tenant_tag(secret: bytes, tenant: str) -> bytes:
    """16 bytes that stand for a tenant in records and counters: HMAC(secret, "tenant" ‖ LE64 length ‖ name)."""
    name = tenant.encode()
    return hmac.digest(secret, b"tenant" + len(name).to_bytes(8, "little") + name, "sha256")[:16]


@dataclass(frozen=True)
class Tenant:
    """A caller."""

    name: str
    keys: TenantKeys
    traffic_class: common_pb2.TrafficClass.ValueType = common_pb2.TRAFFIC_CLASS_CHAT
    """Of requests that give none."""
    max_priority: int | None = None
    """None: any."""

    def check_priority(self, priority: int) -> None:
        """Raises PermissionDenied for a priority above what the credential allows."""
        if self.max_priority is not None and priority > self.max_priority:
            raise PermissionDenied(
                f"your API key allows priorities up to {self.max_priority}; lower it", field="priority"
            )


class Tenants:
    """All callers that this router knows."""

    def __init__(self, secret: bytes, path: Path | None = None, operator_key: str = "") -> None:
        """`operator_key`: the API key of whoever started this router, an operator beside the file's; empty: nobody's.

        Raises SettingsError for a file that cannot be read or says something wrong."""
        self._secret = secret
        self._by_digest: list[tuple[bytes, Tenant | None, str]] = []
        """Digest, tenant (None: not one), operator's name or empty."""
        self._open = Tenant(TENANT, TenantKeys(secret, TENANT)) if path is None else None
        if path is not None:
            self._read(path)
            if operator_key:
                self._by_digest.append((hashlib.sha256(operator_key.encode()).digest(), None, LAUNCHER))

    def caller(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Tenant:
        """The tenant of a call. Raises Unauthenticated when a key is needed and none or an unknown one is given."""
        if self._open is not None:
            return self._open
        tenant, _ = self._find(metadata)
        if tenant is None:
            raise Unauthenticated(_NO_KEY)
        return tenant

    def operator(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
        """The operator's name. Raises Unauthenticated, or PermissionDenied for a tenant's key."""
        if self._open is not None:
            return TENANT
        tenant, operator = self._find(metadata)
        if not operator and tenant is None:
            raise Unauthenticated(_NO_KEY)
        if not operator:
            raise PermissionDenied("this needs an operator's API key; yours is a tenant's")
        return operator

    def keys_of(self, tenant: str) -> TenantKeys:
        """What is derived for a tenant by name, for operators. Raises NotFound for one that is not served here."""
        if self._open is not None and tenant == self._open.name:
            return self._open.keys
        for _, known, _ in self._by_digest:
            if known is not None and known.name == tenant:
                return known.keys
        raise NotFound(
            f"no tenant {tenant!r} is served by this router; name the one whose prefixes are meant (--tenant)",
            field="tenant",
        )

    def serves(self, tenant: str) -> bool:
        """Whether requests can be this tenant's."""
        if self._open is not None:
            return tenant == self._open.name
        return any(known is not None and known.name == tenant for _, known, _ in self._by_digest)

    def tag(self, tenant: str) -> bytes:
        """The tag of any tenant by name, known here or not: what it stored may outlive its entry in the file."""
        return tenant_tag(self._secret, tenant)

    def _find(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[Tenant | None, str]:
        """Every digest is compared, found or not, so that the time says nothing."""
        digest = hashlib.sha256(bearer(metadata)).digest()
        found: tuple[Tenant | None, str] = (None, "")
        for known, tenant, operator in self._by_digest:
            if hmac.compare_digest(known, digest):
                found = (tenant, operator)
        return found

    def _read(self, path: Path) -> None:
        try:
            document = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise SettingsError(f"router.tenants: cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"router.tenants: {path} is no TOML: {error}") from error
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise SettingsError(f"router.tenants: {path}: {where or 'the file'}: {problem['msg']}") from None
        for name, entry in document.tenants.items():
            tenant = Tenant(
                name,
                TenantKeys(self._secret, name, entry.sharing_domain),
                _CLASSES[entry.traffic_class],
                entry.max_priority,
            )
            self._by_digest += [(bytes.fromhex(key), tenant, "") for key in entry.keys]
        for name, operator in document.operators.items():
            self._by_digest += [(bytes.fromhex(key), None, name) for key in operator.keys]


def bearer(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes:
    """The key of `authorization: Bearer KEY`; empty, which is nobody's key, without one."""
    for name, value in metadata or ():
        if name.lower() == METADATA_KEY:
            text = value if isinstance(value, str) else value.decode("latin-1")
            scheme, _, key = text.partition(" ")
            if scheme.lower() == "bearer":
                return key.strip().encode()
    return b""


_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]
_EMPTY_KEY: Final = hashlib.sha256(b"").hexdigest()


class _Keyed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[_Digest, ...] = Field(min_length=1)


class _TenantEntry(_Keyed):
    sharing_domain: str = Field(default="", max_length=64)
    traffic_class: Literal["agent", "chat", "batch"] = "chat"
    max_priority: int = 0


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tenants: Mapping[_Name, _TenantEntry] = Field(default_factory=dict)
    operators: Mapping[_Name, _Keyed] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        """One key is one caller; the digest of nothing is no key."""
        seen: set[str] = set()
        for entry in (*self.tenants.values(), *self.operators.values()):
            for key in entry.keys:
                if key.lower() == _EMPTY_KEY:
                    raise ValueError("a key is the SHA-256 of the empty string: hash the API key itself")
                if key.lower() in seen:
                    raise ValueError(f"the key {key[:8]}… stands in the file twice")
                seen.add(key.lower())
        if not self.tenants:
            raise ValueError("no [tenants.NAME] in it; name at least one, or leave router.tenants unset")
        return self
