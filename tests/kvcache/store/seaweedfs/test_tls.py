"""A cluster in which every connection is mutual TLS (L25)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.tier_harness.certificates import Certificates, make_certificates
from bench.tier_harness.processes import ServerMissing
from bench.tier_harness.weed import WeedCluster
from headrace.kvcache.entries import Miss
from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.open import StoreSettings, open_store
from headrace.kvcache.store.seaweedfs.settings import TlsFiles, parse_url
from headrace.services.worker.tier.weed_volumes import WeedVolumes
from tests.kvcache.store.entries import TENANT, consume, keys, prefix, soon
from tests.kvcache.store.seaweedfs.nodes import durable, wait_until


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def cluster(tmp_path: Path, certificates: Certificates) -> Iterator[WeedCluster]:
    try:
        weed = WeedCluster(tmp_path / "weed", certificates=certificates)
    except ServerMissing as error:
        pytest.skip(str(error))
    try:
        weed.start()
        yield weed
    finally:
        weed.stop()


def test_everything_works_over_tls_and_nothing_without_a_certificate(
    cluster: WeedCluster, certificates: Certificates, tmp_path: Path
) -> None:
    """Writing, reading, erasing, a lost index; a caller whom the cluster's authority did not sign gets misses."""
    files = f"?ca={certificates.ca}&cert={certificates.cert}&key={certificates.key}"
    settings = StoreSettings(f"seaweedfs+tls://{cluster.master.address}{files}", local_directory=str(tmp_path / "one"))
    (tmp_path / "one").mkdir()
    entries = prefix("a", 5)
    store = open_store(settings, volume_files=WeedVolumes)
    try:
        durable(store, entries)
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
    finally:
        store.close()
    (tmp_path / "two").mkdir()
    store = open_store(StoreSettings(settings.url, local_directory=str(tmp_path / "two")), volume_files=WeedVolumes)
    try:
        wait_until(lambda: all(store.lookup(keys(entries), soon())))
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
    finally:
        store.close()
    strangers = make_certificates(tmp_path / "strangers")
    for url in (
        f"seaweedfs://{cluster.master.address}",
        f"seaweedfs+tls://{cluster.master.address}?ca={certificates.ca}&cert={strangers.cert}&key={strangers.key}",
        f"seaweedfs+tls://{cluster.master.address}?ca={strangers.ca}&cert={certificates.cert}&key={certificates.key}",
    ):
        store = open_store(StoreSettings(url, local_directory=str(tmp_path / "two")), volume_files=WeedVolumes)
        try:
            assert all(isinstance(got, Miss) for got in store.get_many(keys(entries), soon(2.0)))
            with pytest.raises(StoreError, match="nothing was erased"):
                store.drop_tenant(TENANT)
        finally:
            store.close()


def test_urls(certificates: Certificates) -> None:
    query = f"?ca={certificates.ca}&cert={certificates.cert}&key={certificates.key}"
    files = TlsFiles(str(certificates.ca), str(certificates.cert), str(certificates.key))
    assert parse_url(f"seaweedfs+tls://a:1,b:2/{query}") == (("a:1", "b:2"), files)
    for wrong in (
        f"seaweedfs://a:1{query}",
        "seaweedfs+tls://a:1",
        "seaweedfs+tls://a:1?ca=x&cert=y",
        f"seaweedfs+tls://a:1{query}x",
        f"seaweedfs+tls://a:1{query}&insecure=1",
    ):
        with pytest.raises(StoreError):
            parse_url(wrong)
