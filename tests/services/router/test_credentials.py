"""API keys and tokens: who they name, when they stop, and what is never told (L25)."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from headrace.services.router import key_stores
from headrace.services.router.api_keys import KeyRole, KeysDocument, TenantLimits, digest_of, mint
from headrace.services.router.key_stores import FileKeys, KeyStoreError, open_keys
from headrace.services.router.settings import RouterSettings, TokenSection
from headrace.services.router.tenants import LAUNCHER, Tenants
from headrace.services.router.tokens import TokenVerifier
from headrace.services.runtime.errors import PermissionDenied, Unauthenticated
from headrace.services.runtime.settings import RegistrySettings, RpcSettings
from headrace.services.runtime.settings_load import SettingsError, load

SECRET = b"a secret of sixteen bytes at least"
ISSUER, AUDIENCE = "https://id.example", "headrace"


def call(credential: str) -> list[tuple[str, str | bytes]]:
    return [("authorization", f"Bearer {credential}")]


class Wall:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def test_a_key_names_its_tenant_until_it_expires_or_is_revoked() -> None:
    """L25. At rest there is a digest; a key with one letter changed, another's secret under this id and an id alone are
    nobody's, in the same words."""
    wall = Wall()
    tenants = Tenants(SECRET, keyed=True, wall=wall)
    key, record = mint(KeyRole.TENANT, "acme", seconds=60)
    other, second = mint(KeyRole.TENANT, "umbrella")
    operator, third = mint(KeyRole.OPERATOR, "alice")
    limits = TenantLimits(sharing_domain="coast", max_priority=2, traffic_class="batch")
    document = KeysDocument().with_key(record, limits).with_key(second).with_key(third)
    assert key not in document.model_dump_json()
    with pytest.raises(Unauthenticated):
        tenants.caller(call(key))
    tenants.take(document)
    assert tenants.caller(call(key)).name == "acme"
    assert tenants.caller(call(key)).limits == limits
    assert tenants.caller(call(key)).max_priority == 2
    assert tenants.operator(call(operator)) == "alice"
    with pytest.raises(PermissionDenied, match="operator"):
        tenants.operator(call(key))
    with pytest.raises(Unauthenticated):
        tenants.caller(call(operator))
    crossed = f"hr_{record.id}_{other.split('_', 2)[2]}"
    said = set()
    for bad in (
        key[:-1] + ("A" if key[-1] != "A" else "B"),
        crossed,
        f"hr_{record.id}_",
        f"hr_{'0' * 12}_x",
        "hr_",
        "x",
    ):
        with pytest.raises(Unauthenticated) as caught:
            tenants.caller(call(bad))
        said.add(str(caught.value))
    assert len(said) == 1
    tenants.take(document.without(second.id, wall.now))
    with pytest.raises(Unauthenticated, match="revoked"):
        tenants.caller(call(other))
    wall.now += 61
    with pytest.raises(Unauthenticated, match="expired"):
        tenants.caller(call(key))


def test_the_launchers_key_works_beside_a_store() -> None:
    tenants = Tenants(SECRET, operator_key="mine", keyed=True)
    assert tenants.operator(call("mine")) == LAUNCHER
    assert not tenants.is_open
    assert Tenants(SECRET).is_open


async def test_routers_that_follow_a_file_refuse_a_revoked_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two routers, one file; what is no document leaves the former keys in force."""
    monkeypatch.setattr(key_stores, "POLL_SECONDS", 0.01)
    path = tmp_path / "keys" / "keys.json"
    store = FileKeys(path)
    key, record = mint(KeyRole.TENANT, "acme")
    await store.update(lambda document: document.with_key(record))
    assert path.stat().st_mode & 0o777 == 0o600
    assert key not in path.read_text()
    routers = [Tenants(SECRET, keyed=True) for _ in range(2)]

    async def follow(tenants: Tenants) -> None:
        async with aclosing(FileKeys(path).follow()) as documents:
            async for document in documents:
                tenants.take(document)

    async with asyncio.TaskGroup() as group:
        followers = [group.create_task(follow(tenants)) for tenants in routers]
        for tenants in routers:
            await until(lambda tenants=tenants: tenants.caller(call(key)).name == "acme")  # type: ignore[misc]
        os.utime(path, (1, 1))
        good = path.read_text()
        path.write_text("no document")
        await asyncio.sleep(0.05)
        assert all(tenants.caller(call(key)).name == "acme" for tenants in routers)
        path.write_text(good)
        await store.update(lambda document: document.without(record.id, time.time()))
        for tenants in routers:
            await until(lambda tenants=tenants: "revoked" in refusal(tenants, key))  # type: ignore[misc]
        for follower in followers:
            follower.cancel()


def refusal(tenants: Tenants, key: str) -> str:
    try:
        tenants.caller(call(key))
    except Unauthenticated as error:
        return str(error)
    return ""


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        try:
            if holds():
                return
        except Unauthenticated:
            pass
        await asyncio.sleep(0.01)
    raise AssertionError("it never came about")


async def test_two_who_create_at_once_lose_nothing(tmp_path: Path) -> None:
    store = FileKeys(tmp_path / "keys.json")
    records = [mint(KeyRole.TENANT, f"tenant-{index}")[1] for index in range(8)]
    await asyncio.gather(*(store.update(lambda document, one=one: document.with_key(one)) for one in records))  # type: ignore[misc]
    assert {key.id for key in (await store.read()).keys} == {record.id for record in records}
    (tmp_path / "keys.json").write_text('{"version": 2}')
    with pytest.raises(KeyStoreError, match="version"):
        await store.read()


def test_a_store_in_etcd_needs_a_registry_there() -> None:
    with pytest.raises(SettingsError, match="registry"):
        open_keys("etcd", RegistrySettings(), RpcSettings(), None)


def test_a_front_door_that_asks_nobody_is_refused() -> None:
    """Without a certificate and without a credential everybody would be the default tenant."""
    with pytest.raises(SettingsError, match="front"):
        load(RouterSettings, sets=["front.port=0"], environ={})


def test_the_tenants_file_is_followed(tmp_path: Path) -> None:
    """A key that leaves the file is nobody's; a file with an error changes nothing."""
    path = tmp_path / "tenants.toml"
    text = "[tenants.{}]\nkeys = ['" + "ab" * 32 + "']\nrequests_per_second = 3\n"
    path.write_text(text.format("acme"))
    tenants = Tenants(SECRET, path)
    assert tenants.serves("acme")
    assert not tenants.reload()
    path.write_text(text.format("umbrella") + "\n")
    assert tenants.reload()
    assert tenants.serves("umbrella")
    assert not tenants.serves("acme")
    path.write_text("[tenants.x]\nkeys = []\n")
    with pytest.raises(SettingsError, match="keys"):
        tenants.reload()
    assert tenants.serves("umbrella")


def test_a_tenants_file_of_equal_size_and_time_is_another_file(tmp_path: Path) -> None:
    """L25: an atomic replacement that keeps the time (`cp -p`, `rsync -t`) takes effect, too."""
    path = tmp_path / "tenants.toml"
    text = "[tenants.acme]\nkeys = ['{}']\n"
    former, new = "revoked", "granted"
    path.write_text(text.format(digest_of(former)))
    tenants = Tenants(SECRET, path)
    assert tenants.caller(call(former)).name == "acme"
    replace_unseen(path, text.format(digest_of(new)).encode())
    assert tenants.reload()
    assert tenants.caller(call(new)).name == "acme"
    with pytest.raises(Unauthenticated):
        tenants.caller(call(former))


def replace_unseen(path: Path, data: bytes) -> None:
    """Another file under the same name, with the size and the times of the former."""
    former = path.stat()
    assert len(data) == former.st_size
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(data)
    os.utime(beside, ns=(former.st_atime_ns, former.st_mtime_ns))
    beside.replace(path)


# --- tokens --------------------------------------------------------------------------------------------------------


def pem(key: Any) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    data: bytes = key.public_key().public_bytes(encoding, form)
    return data


def verifier(tmp_path: Path, data: bytes, **more: Any) -> TokenVerifier:
    path = tmp_path / "issuer.pem"
    path.write_bytes(data)
    return TokenVerifier(TokenSection(keys=path, issuer=ISSUER, audience=AUDIENCE, **more))


def claims(**changed: Any) -> dict[str, Any]:
    given = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 300, "tenant": "acme", **changed}
    return {name: value for name, value in given.items() if value is not None}


KEYS: dict[str, Any] = {
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
    "RS256": rsa.generate_private_key(65537, 2048),
}


@pytest.mark.parametrize("algorithm", KEYS)
def test_a_token_names_its_tenant(tmp_path: Path, algorithm: str) -> None:
    """Through Tenants, with what the document of keys says of that tenant; an operator's role is one."""
    tokens = verifier(tmp_path, pem(KEYS[algorithm]))
    tenants = Tenants(SECRET, tokens=tokens)
    tenants.take(KeysDocument(tenants={"acme": TenantLimits(requests_per_second=5)}))
    token = jwt.encode(claims(), KEYS[algorithm], algorithm=algorithm)
    assert tenants.caller(call(token)).name == "acme"
    assert tenants.caller(call(token)).limits.requests_per_second == 5
    with pytest.raises(PermissionDenied):
        tenants.operator(call(token))
    token = jwt.encode(claims(role="operator", tenant="alice"), KEYS[algorithm], algorithm=algorithm)
    assert tenants.operator(call(token)) == "alice"


@pytest.mark.parametrize(
    "changed",
    [
        {"iss": "https://elsewhere.example"},
        {"aud": "another"},
        {"exp": 1000},
        {"exp": None},
        {"aud": None},
        {"nbf": time.time() + 3600},
        {"tenant": None},
        {"tenant": 7},
        {"tenant": "x" * 65},
        {"role": "root"},
    ],
)
def test_a_token_for_somebody_else_or_another_time_is_nobodys(tmp_path: Path, changed: dict[str, Any]) -> None:
    tokens = verifier(tmp_path, pem(KEYS["ES256"]))
    with pytest.raises(Unauthenticated):
        tokens.verify(jwt.encode(claims(**changed), KEYS["ES256"], algorithm="ES256").encode())


def test_forged_tokens_are_refused(tmp_path: Path) -> None:
    """Another key's signature, none at all, the public key as a shared secret, cut and changed ones."""
    public = pem(KEYS["ES256"])
    tokens = verifier(tmp_path, public)
    good = jwt.encode(claims(), KEYS["ES256"], algorithm="ES256")
    head, body, signature = good.split(".")
    stranger = jwt.encode(claims(), ec.generate_private_key(ec.SECP256R1()), algorithm="ES256")
    none = jwt.encode(claims(), None, algorithm="none")

    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    import hashlib
    import hmac

    signed = f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part(claims())}"
    mac = base64.urlsafe_b64encode(hmac.digest(public, signed.encode(), hashlib.sha256)).rstrip(b"=").decode()
    forged = [
        stranger,
        none,
        f"{signed}.{mac}",
        f"{head}.{part(claims(tenant='umbrella'))}.{signature}",
        "a.b.c",
        "..",
        good[:-4],
    ]
    forged += [jwt.encode(claims(), KEYS["RS256"], algorithm="RS256"), f"{head}.{body}.", "x" * 20000 + ".a.b"]
    for token in forged:
        with pytest.raises(Unauthenticated) as caught:
            tokens.verify(token.encode())
        assert token not in str(caught.value)
    assert tokens.verify(good.encode()).name == "acme"


def test_an_issuer_changes_its_keys(tmp_path: Path) -> None:
    """A JWKS document with two keys by id; the next one drops a key, and its tokens with it, remembered ones too."""

    def jwks(*names: str) -> bytes:
        algorithm = jwt.algorithms.ECAlgorithm
        keys = [{**algorithm.to_jwk(made[name].public_key(), as_dict=True), "kid": name} for name in names]
        return json.dumps({"keys": keys}).encode()

    made = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("old", "new")}
    tokens = verifier(tmp_path, jwks("old", "new"))
    by = {name: jwt.encode(claims(), key, "ES256", {"kid": name}).encode() for name, key in made.items()}
    assert tokens.verify(by["old"]).name == tokens.verify(by["new"]).name == "acme"
    with pytest.raises(Unauthenticated):
        tokens.verify(jwt.encode(claims(), made["old"], "ES256").encode())  # which of the two?
    (tmp_path / "issuer.pem").write_bytes(jwks("new") + b"\n")
    assert tokens.reload()
    assert tokens.verify(by["new"]).name == "acme"
    with pytest.raises(Unauthenticated, match="unknown key"):
        tokens.verify(by["old"])
    (tmp_path / "issuer.pem").write_bytes(b"{}")
    with pytest.raises(SettingsError, match="JWKS"):
        tokens.reload()


def test_an_issuers_file_of_equal_size_and_time_is_another_file(tmp_path: Path) -> None:
    """L25: tokens of the former key are worth nothing, remembered ones neither."""
    former, new = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    tokens = verifier(tmp_path, pem(former))
    token = jwt.encode(claims(), former, "ES256").encode()
    assert tokens.verify(token).name == "acme"
    replace_unseen(tmp_path / "issuer.pem", pem(new))
    assert tokens.reload()
    assert tokens.verify(jwt.encode(claims(), new, "ES256").encode()).name == "acme"
    with pytest.raises(Unauthenticated):
        tokens.verify(token)


def test_a_remembered_token_ends_with_its_time(tmp_path: Path) -> None:
    tokens = verifier(tmp_path, pem(KEYS["ES256"]), leeway_seconds=1)
    wall = Wall()
    tokens._wall = wall
    token = jwt.encode(claims(), KEYS["ES256"], algorithm="ES256").encode()
    tokens.verify(token)
    wall.now += 302
    with pytest.raises(Unauthenticated, match="expired"):
        tokens.verify(token)


def test_tokens_need_an_issuer_and_an_audience() -> None:
    with pytest.raises(SettingsError, match="audience"):
        load(RouterSettings, sets=["tokens.keys=/x", "tokens.issuer=y"], environ={})
