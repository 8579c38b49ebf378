"""Who calls, and what is derived for a tenant: the name comes from the credential, never from the request (L25).

A call brings `authorization: Bearer CREDENTIAL` as gRPC metadata. The credential is an API key of the store that
`headrace keys` writes (`router.keys`, api_keys.py), a JWT (section `tokens`, tokens.py), or an API key whose digest
stands in the TOML file that `router.tenants` names:

    [tenants.acme]
    keys = ["<SHA-256 of an API key, 64 hexadecimal digits>"]
    sharing_domain = "acme-group"     # optional, as the rest: the fields of TenantLimits
    traffic_class = "agent"
    max_priority = 0
    requests_per_second = 10

    [operators.alice]
    keys = ["…"]                      # may manage the cache through this router

All are followed while the router runs. Secrets are compared by digest, in constant time. Without any of the three
everybody is the tenant `default` and may operate, which is right for a machine of one's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace.kvcache.keys import tenant_salt
from headrace.services.router.api_keys import (
    NEVER,
    Digest,
    KeyRecord,
    KeyRole,
    KeysDocument,
    Name,
    TenantLimits,
    digest_of,
    key_id,
)
from headrace.services.router.tokens import TokenVerifier, looks_like_token
from headrace.services.runtime import logs
from headrace.services.runtime.errors import NotFound, PermissionDenied, Unauthenticated
from headrace.services.runtime.files import Stamp, stamp_of
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
_NO_KEY: Final = "no valid credential; send an API key or token as metadata `authorization: Bearer KEY`"
_ANY: Final = TenantLimits()
"""Of everybody where nobody is asked who he is."""
FOLLOW_SECONDS: Final = 1.0
"""How often the files are looked at."""
MAX_REMEMBERED: Final = 4096
_log = logs.get(__name__)


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
    limits: TenantLimits = field(default_factory=TenantLimits)

    def check_priority(self, priority: int) -> None:
        """Raises PermissionDenied for a priority above what the credential allows."""
        if self.max_priority is not None and priority > self.max_priority:
            raise PermissionDenied(
                f"your API key allows priorities up to {self.max_priority}; lower it", field="priority"
            )


class Tenants:
    """All callers that this router knows. Belongs to the event loop's thread."""

    def __init__(
        self,
        secret: bytes,
        path: Path | None = None,
        operator_key: str = "",
        *,
        keyed: bool = False,
        tokens: TokenVerifier | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`operator_key`: the API key of whoever started this router, an operator beside the others; empty: nobody's.
        `keyed`: there is a store of API keys, whose document `take` is given. `tokens`: JWTs are taken, too.

        Raises SettingsError for a file that cannot be read or says something wrong."""
        self._secret = secret
        self._path = path
        self._tokens = tokens
        self._wall = wall
        self._stamp: Stamp | None = None
        self._by_digest: list[tuple[bytes, Tenant | None, str]] = []
        """Of the file: digest, tenant (None: not one), operator's name or empty."""
        self._own = hashlib.sha256(operator_key.encode()).digest() if operator_key else None
        self._in_file: dict[str, TenantLimits] = {}
        self._document = KeysDocument()
        self._by_id: dict[str, KeyRecord] = {}
        self._made: dict[str, Tenant] = {}
        """Tenants by name, made when they are first met."""
        self._open = None if path is not None or keyed or tokens is not None else self._make(TENANT, _ANY)
        self.reload()

    @property
    def is_open(self) -> bool:
        """Nobody is asked who he is."""
        return self._open is not None

    def take(self, document: KeysDocument) -> None:
        """The store's document as it is now: revoked keys are worth nothing from here on."""
        self._document = document
        self._by_id = {key.id: key for key in document.keys}
        self._made.clear()

    def reload(self) -> bool:
        """Read the files again if they have changed; whether anything has. Raises SettingsError; what was read before
        stays in force then."""
        changed = self._tokens is not None and self._tokens.reload()
        if self._path is None:
            return changed
        try:
            stamp = stamp_of(self._path)
        except OSError as error:
            raise SettingsError(f"router.tenants: cannot read {self._path}: {error.strerror}") from error
        if stamp == self._stamp:
            return changed
        document = _read(self._path)
        self._stamp = stamp
        self._made.clear()
        self._in_file = {
            name: TenantLimits.model_validate(entry.model_dump(exclude={"keys"}))
            for name, entry in document.tenants.items()
        }
        self._by_digest = [
            (bytes.fromhex(key), self._tenant(name), "")
            for name, entry in document.tenants.items()
            for key in entry.keys
        ]
        self._by_digest += [
            (bytes.fromhex(key), None, name) for name, operator in document.operators.items() for key in operator.keys
        ]
        return True

    async def follow(self) -> None:
        """Keep up with the files for ever; a background task of the process."""
        told = ""
        while self._path is not None or self._tokens is not None:
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                if self.reload():
                    _log.info("credentials were read again")
                told = ""
            except SettingsError as error:
                if str(error) != told:
                    _log.warning("credentials cannot be read; the former ones stay in force", error=str(error))
                told = str(error)

    def caller(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Tenant:
        """The tenant of a call. Raises Unauthenticated when a credential is needed and none, a wrong, expired or
        revoked one is given."""
        if self._open is not None:
            return self._open
        tenant, _ = self._find(metadata)
        if tenant is None:
            raise Unauthenticated(_NO_KEY)
        return tenant

    def operator(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
        """The operator's name. Raises Unauthenticated, or PermissionDenied for a tenant's credential."""
        if self._open is not None:
            return TENANT
        tenant, operator = self._find(metadata)
        if not operator and tenant is None:
            raise Unauthenticated(_NO_KEY)
        if not operator:
            raise PermissionDenied("this needs an operator's credential; yours is a tenant's")
        return operator

    def keys_of(self, tenant: str) -> TenantKeys:
        """What is derived for a tenant by name, for operators. Raises NotFound for one that is not served here."""
        if not self.serves(tenant):
            raise NotFound(
                f"no tenant {tenant!r} is served by this router; name the one whose prefixes are meant (--tenant)",
                field="tenant",
            )
        return self._open.keys if self._open is not None else self._tenant(tenant).keys

    def serves(self, tenant: str) -> bool:
        """Whether requests can be this tenant's."""
        if self._open is not None:
            return tenant == self._open.name
        return tenant in self._in_file or tenant in self._document.tenants or tenant in self._made

    def tag(self, tenant: str) -> bytes:
        """The tag of any tenant by name, known here or not: what it stored may outlive its entry in the file."""
        return tenant_tag(self._secret, tenant)

    def _find(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[Tenant | None, str]:
        """(tenant, operator's name or empty). Raises Unauthenticated for a credential that was good once, or a bad
        token."""
        credential = bearer(metadata)
        identifier = key_id(credential)
        if identifier is not None:
            return self._of_record(credential, self._by_id.get(identifier))
        if self._tokens is not None and looks_like_token(credential):
            named = self._tokens.verify(credential)
            return self._holder(named.role, named.name)
        return self._of_digest(credential)

    def _of_record(self, credential: bytes, record: KeyRecord | None) -> tuple[Tenant | None, str]:
        """An unknown id costs the same comparison."""
        expected = NEVER if record is None else record.digest.lower()
        if not hmac.compare_digest(digest_of(credential), expected) or record is None:
            return None, ""
        now = self._wall()
        if not record.usable(now):
            raise Unauthenticated(f"this API key is {record.state(now)}; ask an operator for another")
        return self._holder(record.role, record.name)

    def _of_digest(self, credential: bytes) -> tuple[Tenant | None, str]:
        """Every digest is compared, found or not, so that the time says nothing."""
        digest = hashlib.sha256(credential).digest()
        found: tuple[Tenant | None, str] = (None, "")
        for known, tenant, operator in self._by_digest:
            if hmac.compare_digest(known, digest):
                found = (tenant, operator)
        if self._own is not None and hmac.compare_digest(self._own, digest):
            found = (None, LAUNCHER)
        return found

    def _holder(self, role: KeyRole, name: str) -> tuple[Tenant | None, str]:
        return (None, name) if role is KeyRole.OPERATOR else (self._tenant(name), "")

    def _tenant(self, name: str) -> Tenant:
        tenant = self._made.get(name)
        if tenant is None:
            if len(self._made) >= MAX_REMEMBERED:
                self._made.clear()
            limits = self._in_file.get(name) or self._document.tenants.get(name) or TenantLimits()
            tenant = self._made[name] = self._make(name, limits)
        return tenant

    def _make(self, name: str, limits: TenantLimits) -> Tenant:
        return Tenant(
            name,
            TenantKeys(self._secret, name, limits.sharing_domain),
            _CLASSES[limits.traffic_class],
            None if limits is _ANY else limits.max_priority,
            limits,
        )


def _read(path: Path) -> _File:
    try:
        return _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SettingsError(f"router.tenants: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"router.tenants: {path} is no TOML: {error}") from error
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise SettingsError(f"router.tenants: {path}: {where or 'the file'}: {problem['msg']}") from None


def bearer(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes:
    """The key of `authorization: Bearer KEY`; empty, which is nobody's key, without one."""
    for name, value in metadata or ():
        if name.lower() == METADATA_KEY:
            text = value if isinstance(value, str) else value.decode("latin-1")
            scheme, _, key = text.partition(" ")
            if scheme.lower() == "bearer":
                return key.strip().encode()
    return b""


_EMPTY_KEY: Final = hashlib.sha256(b"").hexdigest()


class _Keyed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[Digest, ...] = Field(min_length=1)


class _TenantEntry(TenantLimits):
    keys: tuple[Digest, ...] = Field(min_length=1)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tenants: Mapping[Name, _TenantEntry] = Field(default_factory=dict)
    operators: Mapping[Name, _Keyed] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        """One key is one caller; the digest of nothing is no key."""
        seen: set[str] = set()
        of_tenants = [key for entry in self.tenants.values() for key in entry.keys]
        of_operators = [key for entry in self.operators.values() for key in entry.keys]
        for key in of_tenants + of_operators:
            if key.lower() == _EMPTY_KEY:
                raise ValueError("a key is the SHA-256 of the empty string: hash the API key itself")
            if key.lower() in seen:
                raise ValueError(f"the key {key[:8]}… stands in the file twice")
            seen.add(key.lower())
        if not self.tenants:
            raise ValueError("no [tenants.NAME] in it; name at least one, or leave router.tenants unset")
        return self
