"""JSON Web Tokens as credentials: signed by an identity provider, good for a while, checked without asking anybody."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from headrace.services.router.api_keys import KeyRole
from headrace.services.router.settings import TokenSection
from headrace.services.runtime.errors import Unauthenticated
from headrace.services.runtime.files import Stamp, stamp_of
from headrace.services.runtime.settings_load import SettingsError

REMEMBERED: Final = 4096
"""Tokens whose signature need not be checked again."""
MAX_TOKEN_BYTES: Final = 16 * 1024
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "RS256": (rsa.RSAPublicKey,),
    "ES256": (ec.EllipticCurvePublicKey,),
    "EdDSA": (ed25519.Ed25519PublicKey,),
}
"""The key that an algorithm takes: a public key is never taken for a shared secret."""


@dataclass(frozen=True)
class Bearer:
    """Whom a token names."""

    role: KeyRole
    name: str
    expires: float
    """Wall clock, leeway included."""


def looks_like_token(credential: bytes) -> bool:
    """Three parts, as in a JWT; an API key has no dot."""
    return credential.count(b".") == 2


class TokenVerifier:
    """Checks tokens against the public keys of one file."""

    def __init__(self, settings: TokenSection, wall: Callable[[], float] = time.time) -> None:
        """Raises SettingsError for a file of keys that cannot be used."""
        assert settings.keys is not None
        self._settings = settings
        self._path: Path = settings.keys
        self._wall = wall
        self._keys: dict[str, Any] = {}
        """Public keys by id; a PEM file's has the id ""."""
        self._known: dict[bytes, Bearer] = {}
        self._stamp: Stamp | None = None
        self.reload()

    def reload(self) -> bool:
        """Read the file again if it has changed; whether it has. Raises SettingsError; the former keys stay then."""
        try:
            stamp = stamp_of(self._path)
            if stamp == self._stamp:
                return False
            keys = _read(self._path.read_bytes())
        except (OSError, ValueError, jwt.PyJWTError) as error:
            raise SettingsError(f"tokens.keys: {self._path} cannot be used: {error}") from error
        self._stamp, self._keys = stamp, keys
        self._known.clear()
        return True

    def verify(self, token: bytes) -> Bearer:
        """Whom it names. Raises Unauthenticated; the message never repeats the token."""
        if len(token) > MAX_TOKEN_BYTES:
            raise Unauthenticated("the token is too long; get a smaller one")
        digest = hashlib.sha256(token).digest()
        bearer = self._known.get(digest)
        if bearer is None:
            bearer = self._check(token)
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[digest] = bearer
        if self._wall() >= bearer.expires:
            self._known.pop(digest, None)
            raise Unauthenticated("the token has expired; get a new one")
        return bearer

    def _check(self, token: bytes) -> Bearer:
        settings = self._settings
        try:
            header = jwt.get_unverified_header(token)
            algorithm = header.get("alg")
            key: Any = self._keys.get(header.get("kid") or "")
            if key is None and len(self._keys) == 1 and "kid" not in header:
                key = next(iter(self._keys.values()))
            if algorithm not in settings.algorithms or key is None or not _fits(key, algorithm):
                raise Unauthenticated("the token is signed by an unknown key; get one from this cluster's issuer")
            claims = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                issuer=settings.issuer,
                audience=settings.audience,
                leeway=settings.leeway_seconds,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthenticated("the token has expired; get a new one") from None
        except jwt.PyJWTError as error:
            raise Unauthenticated(f"the token is not valid here ({type(error).__name__}); get a new one") from None
        return self._bearer(claims)

    def _bearer(self, claims: dict[str, Any]) -> Bearer:
        settings = self._settings
        name, role = claims.get(settings.tenant_claim), claims.get(settings.role_claim, KeyRole.TENANT.value)
        if not isinstance(name, str) or not 1 <= len(name) <= 64 or not name.isprintable():
            raise Unauthenticated(f"the token names nobody: it needs the claim {settings.tenant_claim!r}")
        try:
            return Bearer(KeyRole(role), name, float(claims["exp"]) + settings.leeway_seconds)
        except ValueError:
            raise Unauthenticated("the token's role is neither tenant nor operator") from None


def _fits(key: object, algorithm: str) -> bool:
    return isinstance(key, _KINDS[algorithm])


def _read(data: bytes) -> dict[str, Any]:
    """Public keys of a JWKS document or a PEM file. Raises ValueError, PyJWTError."""
    if data.lstrip().startswith(b"-----BEGIN"):
        return {"": load_pem_public_key(data)}
    document = json.loads(data)
    if not isinstance(document, dict) or not isinstance(document.get("keys"), list):
        raise ValueError("neither PEM nor a JWKS document")
    for entry in document["keys"]:
        if not isinstance(entry, dict) or entry.get("kty") not in ("RSA", "EC", "OKP"):
            raise ValueError("a key of a JWKS document must be public: RSA, EC or OKP")
    keys: dict[str, Any] = {}
    for one in jwt.PyJWKSet.from_dict(document).keys:
        keys[one.key_id or ""] = one.key
    return keys
