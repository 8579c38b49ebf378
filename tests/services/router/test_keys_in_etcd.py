"""API keys and membership in a real etcd that demands certificates (router.keys=etcd, registry.etcd_ca)."""

from __future__ import annotations

import asyncio
import shutil
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from bench._ports import free_ports
from headrace.cli.certificates import issue, make_authority
from headrace.services.router.api_keys import KeyRole, KeysDocument, mint
from headrace.services.router.key_stores import EtcdKeys, KeyStore, KeyStoreError, open_keys
from headrace.services.router.tenants import Tenants
from headrace.services.runtime.errors import Unauthenticated
from headrace.services.runtime.peers import Peer, PeerRole
from headrace.services.runtime.registry.base import RegistryUnavailableError
from headrace.services.runtime.registry.etcd import EtcdRegistry
from headrace.services.runtime.registry.open import open_registry
from headrace.services.runtime.settings import RegistrySettings, RpcSettings
from headrace.services.runtime.tls import Tls

PATIENCE_S = 60.0
RPC = RpcSettings()

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed (Debian: etcd-server)")


@pytest_asyncio.fixture
async def registry(tmp_path: Path) -> AsyncIterator[RegistrySettings]:
    """How to reach an etcd with mutual TLS of its own authority."""
    make_authority(tmp_path / "tls")
    files = issue(tmp_path / "tls", Peer(PeerRole.ROUTER), name="etcd")
    mine = issue(tmp_path / "tls", Peer(PeerRole.ROUTER), name="mine")
    client, peer = free_ports(2)
    flags = {
        "data-dir": str(tmp_path / "etcd"),
        "listen-client-urls": f"https://127.0.0.1:{client}",
        "advertise-client-urls": f"https://127.0.0.1:{client}",
        "listen-peer-urls": f"http://127.0.0.1:{peer}",
        "initial-advertise-peer-urls": f"http://127.0.0.1:{peer}",
        "initial-cluster": f"default=http://127.0.0.1:{peer}",
        "cert-file": str(files.cert),
        "key-file": str(files.key),
        "trusted-ca-file": str(files.ca),
        "client-cert-auth": "true",
        "log-level": "error",
    }
    process = await asyncio.create_subprocess_exec(
        "etcd", *(f"--{name}={value}" for name, value in flags.items()), stdout=DEVNULL, stderr=DEVNULL
    )
    settings = RegistrySettings(
        kind="etcd", address=f"127.0.0.1:{client}", etcd_ca=mine.ca, etcd_cert=mine.cert, etcd_key=mine.key
    )
    try:
        await eventually_up(open_keys("etcd", settings, RPC, None))
        yield settings
    finally:
        process.terminate()
        await process.wait()


async def eventually_up(store: KeyStore) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await store.read()
                break
            except KeyStoreError:
                await asyncio.sleep(0.05)
    await store.close()


async def test_routers_that_watch_etcd_refuse_a_revoked_key_at_once(registry: RegistrySettings) -> None:
    """Two routers follow; two operators create at once and lose nothing."""
    store = open_keys("etcd", registry, RPC, None)
    assert isinstance(store, EtcdKeys)
    assert await store.read() == KeysDocument()
    made = [mint(KeyRole.TENANT, name) for name in ("acme", "umbrella")]
    await asyncio.gather(*(store.update(lambda document, one=record: document.with_key(one)) for _, record in made))  # type: ignore[misc]
    routers = [Tenants(b"0123456789abcdef", keyed=True) for _ in range(2)]
    stores = [open_keys("etcd", registry, RPC, None) for _ in routers]
    taken = [asyncio.Event() for _ in routers]

    async def follow(at: int) -> None:
        async with aclosing(stores[at].follow()) as documents:
            async for document in documents:
                routers[at].take(document)
                taken[at].set()

    followers = [asyncio.create_task(follow(at)) for at in range(2)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            for event in taken:
                await event.wait()
                event.clear()
            for router in routers:
                for key, record in made:
                    assert router.caller([("authorization", f"Bearer {key}")]).name == record.name
            await store.update(lambda document: document.without(made[0][1].id, time.time()))
            for event in taken:
                await event.wait()
        for router in routers:
            with pytest.raises(Unauthenticated, match="revoked"):
                router.caller([("authorization", f"Bearer {made[0][0]}")])
            assert router.caller([("authorization", f"Bearer {made[1][0]}")]).name == "umbrella"
    finally:
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        for one in (store, *stores):
            await one.close()


async def test_without_the_right_certificate_etcd_says_nothing(registry: RegistrySettings, tmp_path: Path) -> None:
    """The registry with it, and the process's own where etcd has none of its own; strangers and plain text do not."""
    assert registry.etcd_cert is not None
    own = Tls(tmp_path / "tls" / "ca.crt", registry.etcd_cert, registry.etcd_key)
    make_authority(tmp_path / "foreign")
    foreign = issue(tmp_path / "foreign", Peer(PeerRole.ROUTER))
    bare = registry.model_copy(update={"etcd_cert": None, "etcd_key": None})
    for settings, tls in ((registry, None), (bare, own)):
        opened = open_registry(settings, RPC, tls)
        assert await opened.members() == ()
        await opened.close()
    strange = registry.model_copy(update={"etcd_cert": foreign.cert, "etcd_key": foreign.key})
    for settings in (bare, strange, registry.model_copy(update={"etcd_ca": None})):
        refused = open_registry(settings, RPC, None)
        assert isinstance(refused, EtcdRegistry)
        with pytest.raises(RegistryUnavailableError):
            await refused.members()
        await refused.close()
