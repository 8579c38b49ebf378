"""A store from its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.open import StoreSettings, open_store, segment_settings
from headrace.kvcache.store.segments.settings import MIB
from tests.kvcache.store.contract import closing, durable
from tests.kvcache.store.entries import consume, keys, prefix, soon


def test_a_directory_becomes_a_store(tmp_path: Path) -> None:
    settings = StoreSettings(f"file://{tmp_path}/store", segment_bytes=1 << 20)
    entries = prefix("a", 3)
    with closing(open_store(settings)) as store:
        durable(store, entries)
    with closing(open_store(settings)) as store:
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]


@pytest.mark.parametrize(
    ("url", "index"),
    [
        ("/var/store", "sqlite"),
        ("file://", "sqlite"),
        ("file://relative/path", "sqlite"),
        ("ftp://host/dir", "sqlite"),
        ("file:///proc/nothing/here", "sqlite"),
        ("file:///tmp", "mysql://x"),
    ],
)
def test_what_cannot_be_opened_says_what_to_do(url: str, index: str) -> None:
    with pytest.raises(StoreError, match=r"use|needs"):
        open_store(StoreSettings(url, index=index))


def test_the_segment_engine_is_told_what_is_set() -> None:
    """How large segments become below the largest: test_quotas.py."""
    assert segment_settings(StoreSettings("file:///x")).segment_bytes == 256 * MIB
    assert segment_settings(StoreSettings("file:///x", segment_bytes=MIB)).segment_bytes == MIB
    named = segment_settings(StoreSettings("file:///x", node="host", boot="abc"))
    assert named.writer == "host-abc"
