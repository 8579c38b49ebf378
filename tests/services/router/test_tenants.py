"""Tenants come from credentials, and what is derived for them separates every cache (L25)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.services.encoder.cache import EmbeddingCache
from headrace.services.router.tenants import TENANT, TenantKeys, Tenants, bearer, tenant_tag
from headrace.services.runtime.clock import SystemClock
from headrace.services.runtime.errors import PermissionDenied, Unauthenticated, grpc_status, http_status
from headrace.services.runtime.images import cache_key, content_digest
from headrace.services.runtime.settings_load import SettingsError
from headrace.v1 import common_pb2

SECRET = b"a secret of sixteen bytes at least"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def file_of(folder: Path, text: str) -> Path:
    path = folder / "tenants.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    return Tenants(
        SECRET,
        file_of(
            tmp_path,
            f"""
            [tenants.acme]
            keys = ["{digest("acme-1")}", "{digest("acme-2").upper()}"]
            traffic_class = "agent"
            max_priority = 3
            [tenants.umbrella]
            keys = ["{digest("umbrella")}"]
            [tenants.north]
            keys = ["{digest("north")}"]
            sharing_domain = "coast"
            [tenants.south]
            keys = ["{digest("south")}"]
            sharing_domain = "coast"
            [operators.alice]
            keys = ["{digest("alice")}"]
            """,
        ),
    )


def call(key: str) -> list[tuple[str, str | bytes]]:
    return [("x-request-id", "r"), ("authorization", f"Bearer {key}")]


def test_the_key_names_the_tenant(tenants: Tenants) -> None:
    assert tenants.caller(call("acme-1")).name == tenants.caller(call("acme-2")).name == "acme"
    assert tenants.caller(call("acme-1")).traffic_class == common_pb2.TRAFFIC_CLASS_AGENT
    assert tenants.caller(call("umbrella")).traffic_class == common_pb2.TRAFFIC_CLASS_CHAT
    assert tenants.operator(call("alice")) == "alice"


@pytest.mark.parametrize(
    "metadata", [None, [], [("authorization", "Basic YTpi")], call(""), call("acme-3"), call("alice")]
)
def test_anything_else_is_nobody(tenants: Tenants, metadata: list[tuple[str, str | bytes]] | None) -> None:
    """No key, another scheme, an empty or unknown key, an operator's key: UNAUTHENTICATED and 401."""
    with pytest.raises(Unauthenticated, match="Bearer") as caught:
        tenants.caller(metadata)
    assert grpc_status(caught.value).name == "UNAUTHENTICATED"
    assert http_status(caught.value) == 401


def test_operators_only_manage(tenants: Tenants) -> None:
    with pytest.raises(PermissionDenied):
        tenants.operator(call("acme-1"))
    with pytest.raises(Unauthenticated):
        tenants.operator(call("nobody"))


def test_who_started_the_router_is_an_operator(tmp_path: Path) -> None:
    """`headrace up` asks and drains its own router, whatever the file says."""
    file = file_of(tmp_path, f'[tenants.acme]\nkeys = ["{digest("acme")}"]\n')
    assert Tenants(SECRET, file, "drawn").operator(call("drawn")) == "launcher"
    with pytest.raises(Unauthenticated):
        Tenants(SECRET, file, "drawn").caller(call("drawn"))
    with pytest.raises(Unauthenticated):
        Tenants(SECRET, file).operator(call(""))


def test_priority_is_what_the_credential_allows(tenants: Tenants) -> None:
    tenants.caller(call("acme-1")).check_priority(3)
    with pytest.raises(PermissionDenied, match="priority"):
        tenants.caller(call("acme-1")).check_priority(4)
    with pytest.raises(PermissionDenied):
        tenants.caller(call("umbrella")).check_priority(1)
    Tenants(SECRET).caller(None).check_priority(9)


def test_without_a_file_everybody_is_the_default() -> None:
    open_house = Tenants(SECRET)
    assert open_house.caller(None).name == open_house.caller(call("x")).name == TENANT
    assert open_house.operator(None) == TENANT


def test_a_sharing_domain_shares_keys_and_not_tags(tenants: Tenants) -> None:
    north, south = tenants.caller(call("north")).keys, tenants.caller(call("south")).keys
    assert (north.salt, north.image_key) == (south.salt, south.image_key)
    assert north.tag != south.tag
    assert tenants.tag("north") == north.tag
    assert tenants.tag("gone since") == tenant_tag(SECRET, "gone since")
    assert TenantKeys(SECRET, "coast").salt != north.salt, "a tenant's name is no domain's"


@given(st.text(max_size=20), st.text(max_size=20))
def test_tags_and_salts_differ_with_names(one: str, other: str) -> None:
    assert (tenant_tag(SECRET, one) == tenant_tag(SECRET, other)) == (one == other)
    if one and other:
        assert (TenantKeys(SECRET, one).salt == TenantKeys(SECRET, other).salt) == (one == other)


async def test_one_picture_of_two_tenants_is_two_embeddings_even_in_flight() -> None:
    """L25: whoever asks second for the same picture meets only an entry of its own tenant, ready or not."""
    cache = EmbeddingCache(4, 16, 8, 10.0, SystemClock())
    picture = content_digest(b"the same picture", None)
    acme, umbrella = (TenantKeys(SECRET, name).image_key for name in ("acme", "umbrella"))
    first, found = cache.find_or_begin(cache_key(acme, picture))
    assert not found
    second, found = cache.find_or_begin(cache_key(umbrella, picture))
    assert not found
    assert second is not first
    assert not first.ready.done()
    again, found = cache.find_or_begin(cache_key(acme, picture))
    assert found
    assert again is first


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[tenants.a]\nkeys = []", "keys"),
        ("[tenants.a]\nkeys = ['abc']", "keys"),
        (f"[tenants.a]\nkeys = ['{digest('k')}']\n[tenants.b]\nkeys = ['{digest('k')}']", "twice"),
        (f"[tenants.a]\nkeys = ['{digest('')}']", "empty string"),
        (f"[tenants.a]\nkeys = ['{digest('k')}']\nquotas = 3", "quotas"),
        (f"[tenants.'a b']\nkeys = ['{digest('k')}']", "tenants"),
        (f"[operators.a]\nkeys = ['{digest('k')}']", "tenants"),
        ("[tenants", "no TOML"),
    ],
)
def test_a_wrong_file_stops_the_start(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        Tenants(SECRET, file_of(tmp_path, text))
    with pytest.raises(SettingsError, match="cannot read"):
        Tenants(SECRET, tmp_path / "absent.toml")


def test_bearer_reads_one_scheme() -> None:
    assert bearer([("Authorization", "bearer  k ")]) == b"k"
    assert bearer([("authorization", b"Bearer k")]) == b"k"
    assert bearer([("authorization", "k")]) == b""
