"""How fast the SeaweedFS engine stores and reads with two copies, all on one machine: figures, no bar."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.tier_harness.load import make_block, read_back, write
from bench.tier_harness.weed import WeedCluster
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.seaweedfs.store import SeaweedStore


@dataclass(frozen=True)
class SeaweedSpeed:
    payload_bytes: int
    entries: int
    copies: int
    readers: int
    """Threads, as `writers`."""
    writers: int
    durable_write_mb_s: float
    """Payload bytes per second until both servers have synced them (fsync) and the index knows them."""
    write_mb_s: float
    """The same without fsync."""
    verified_read_mb_s: float
    """Every payload's digest checked, 16 records at a time. Pages are in the servers' cache."""


def measure(folder: Path, payload_bytes: int, entries: int, told: Callable[[], None]) -> SeaweedSpeed:
    """Start a cluster of three volume servers in `folder`, measure, stop it. `told` is called after each stage (3)."""
    cluster = WeedCluster(folder / "weed", volume_mb=1_024)
    speeds: dict[str, float] = {}
    payload = entries * payload_bytes / 1e6
    try:
        cluster.start()
        blocks = [make_block(number, payload_bytes) for number in range(8 + entries)]
        for name, fsync in (("durable", True), ("plain", False)):
            settings = SeaweedSettings((cluster.master.address,), collection=name, fsync=fsync)
            store = SeaweedStore(settings, DictIndex())
            try:
                write(store, blocks[:8])  # volumes are made at the first write
                began = time.monotonic()
                durable = write(store, blocks[8:])
                speeds[name] = payload / (time.monotonic() - began)
                told()
                if fsync:
                    began = time.monotonic()
                    outcomes = read_back(store, durable, deadline_s=30.0)
                    speeds["read"] = payload / (time.monotonic() - began)
                    if outcomes["hit"] != entries:
                        raise RuntimeError(f"not everything was stored and read back: {dict(outcomes)}")
                    told()
            finally:
                store.close()
    finally:
        cluster.stop()
    return SeaweedSpeed(
        payload_bytes=payload_bytes,
        entries=entries,
        copies=settings.copies,
        readers=settings.readers,
        writers=settings.writers,
        durable_write_mb_s=speeds["durable"],
        write_mb_s=speeds["plain"],
        verified_read_mb_s=speeds["read"],
    )
