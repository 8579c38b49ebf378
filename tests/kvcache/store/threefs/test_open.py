"""`3fs://` URLs, and what goes wrong with them."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from headrace.kvcache.entries import Miss
from headrace.kvcache.store.base import StoreError
from headrace.kvcache.store.open import StoreSettings, open_store
from headrace.kvcache.store.threefs.locks import FOLDER, Holder, HostLocks
from headrace.kvcache.store.threefs.names import Names
from tests.kvcache.store.contract import durable
from tests.kvcache.store.entries import Payload, consume, keys, prefix, soon
from tests.kvcache.store.threefs.test_ring import wait_for
from tests.kvcache.store.threefs.usrbio_double import Double, descriptors


def settings_for(double: Double, mount: Path, tmp_path: Path, **changes: object) -> StoreSettings:
    values: dict[str, object] = {
        "url": f"3fs://{mount}/a%20store?lib={double.path}",
        "local_directory": str(tmp_path),
        "segment_bytes": 1 << 20,
        "queue_bytes": 4 << 20,
        "read_buffer_bytes": 4 << 20,
    }
    return StoreSettings(**(values | changes))  # type: ignore[arg-type]


def test_a_store_is_opened_used_closed_and_opened_again(double: Double, mount: Path, tmp_path: Path) -> None:
    (mount / "a store").mkdir()
    entries = prefix("a", 4)
    left = []
    for turn in range(3):
        store = open_store(settings_for(double, mount, tmp_path))
        if turn == 0:
            durable(store, list(entries))
        assert consume(store.get_many(keys(entries), soon())) == [entry.payload for entry in entries]
        store.close()
        left.append(descriptors())
    assert left[2] <= left[1]
    assert list((mount / "3fs-virt" / "iovs").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"url": "3fs://host/mount/store"}, "3fs:///mount/directory"),
        ({"url": "3fs:///mnt/store?library=x"}, "lib="),
        ({"url": "3fs:///mnt/store?lib=/nothing.so"}, "hf3fs_api_shared"),
        ({"local_directory": ""}, "redis://"),
    ],
)
def test_bad_settings_say_what_to_do(
    double: Double, mount: Path, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(StoreError, match=words):
        open_store(settings_for(double, mount, tmp_path, **changes))


def test_a_directory_that_is_not_there_is_refused(double: Double, mount: Path, tmp_path: Path) -> None:
    """Not made: its chunk size and chains are the administrator's to choose (README.md)."""
    with pytest.raises(StoreError, match="must exist"):
        open_store(settings_for(double, mount, tmp_path))


def test_a_store_outlives_its_mount(double: Double, mount: Path, tmp_path: Path) -> None:
    """L6, L17: with the FUSE process gone reads are misses by their deadline, then at once; a new one is taken up
    without a restart, on new rings, and what was durable is there."""
    (mount / "a store").mkdir()
    old, new = prefix("a", 4), prefix("b", 4)
    store = open_store(settings_for(double, mount, tmp_path))
    durable(store, list(old))
    assert consume(store.get_many(keys(old), soon())) == [entry.payload for entry in old]

    def read() -> list[Payload | Miss]:
        return consume(store.get_many(keys(old), time.monotonic() + 0.05))

    double.set(mounted=0)
    seen: set[Payload | Miss] = set()
    while Miss.NOT_CONNECTED not in seen:
        seen |= set(read())
    assert seen <= {Miss.TIMEOUT, Miss.NOT_CONNECTED}
    ticket = store.put_many(new)
    assert store.flush(30.0)
    assert not any(ticket.durable.result(timeout=60.0))

    double.set(mounted=1)
    wait_for(lambda: read() == [entry.payload for entry in old])
    durable(store, list(new))
    assert consume(store.get_many(keys(new), soon())) == [entry.payload for entry in new]
    store.close()
    assert list((mount / "3fs-virt" / "iovs").iterdir()) == []


def test_a_sweeper_on_another_host_gives_way_when_it_is_known_dead(double: Double, mount: Path, tmp_path: Path) -> None:
    """Its lock stays behind on the mount, and nothing here can look at its process; the service's registry can."""
    root = mount / "a store"
    root.mkdir()
    HostLocks(str(root), Names(), "far-1", None).take("sweeper.lock")
    (entry,) = (root / FOLDER).iterdir()
    holder = Holder.parse(entry.name)
    assert holder is not None
    entry.rename(entry.with_name(dataclasses.replace(holder, host="another").name))
    asked: list[str] = []
    dead: set[str] = set()

    def lives(writer: str) -> bool:
        asked.append(writer)
        return writer not in dead

    store = open_store(settings_for(double, mount, tmp_path), liveness=lives)
    try:
        assert "another process" in store.collect().refused
        assert set(asked) == {"far-1"}
        dead.add("far-1")
        assert store.collect().refused == ""
    finally:
        store.close()
