"""LMCache's local disk backend, measured in an interpreter that has the package `lmcache`; imports nothing of Headrace.

    PYTHON lmcache_child.py DIRECTORY PAYLOAD_BYTES ENTRIES ROUNDS THREADS

Prints one JSON object: bytes per second of each round. Its public calls only: batched_submit_put_task and
batched_get_blocking, O_DIRECT on where the size allows it, in-memory copies (local_cpu) off.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import sys
import threading
import time
from typing import Any


def main() -> None:
    directory, payload, entries, rounds, threads = sys.argv[1], *map(int, sys.argv[2:6])
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    # Its log goes to stdout, which is ours.
    with contextlib.redirect_stdout(sys.stderr):
        result = measure(directory, payload, entries, rounds, threads)
    json.dump(result, sys.stdout)


def measure(directory: str, payload: int, entries: int, rounds: int, threads: int) -> dict[str, Any]:
    from lmcache.utils import CacheEngineKey  # first, so that its absence is found before torch is loaded

    import torch  # isort: skip
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

    gib = 1 << 30
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=128,
        local_cpu=False,
        max_local_cpu_size=2 * payload * entries / gib + 0.25,
        local_disk=directory,
        max_local_disk_size=4 * payload * entries * rounds / gib + 1,
        extra_config={"use_odirect": True, "disk_io_threads": threads},
    )
    metadata = LMCacheMetadata(
        model_name="bench",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.uint8,
        kv_shape=(1, 1, 128, 1, payload // 128),
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    memory = LocalCPUBackend(config, metadata, "cpu")
    disk = LocalDiskBackend(config, loop, memory, "cpu", None, metadata)

    shape, dtype = torch.Size([1, 1, 128, payload // 128]), torch.uint8
    pattern = torch.arange(payload, dtype=torch.int64).to(torch.uint8)
    wrote, durable, read = [], [], []
    right = True
    for turn in range(rounds):
        keys = [CacheEngineKey("bench", 1, 0, turn * entries + number, dtype) for number in range(entries)]
        objects = [memory.allocate(shape, dtype, MemoryFormat.KV_MLA_FMT) for _ in keys]
        for number, each in enumerate(objects):
            each.tensor.view(torch.uint8).flatten()[:payload] = pattern + number
        done = threading.Semaphore(0)
        started = time.perf_counter()
        disk.batched_submit_put_task(keys, objects, on_complete_callback=lambda _, done=done: done.release())
        for _ in keys:
            done.acquire()
        wrote.append(payload * entries / (time.perf_counter() - started))
        # It never syncs; whoever wants its files to survive has to.
        sync_files(directory)
        durable.append(payload * entries / (time.perf_counter() - started))
        for each in objects:
            each.ref_count_down()
        drop_page_cache(directory)
        started = time.perf_counter()
        found = disk.batched_get_blocking(keys)
        read.append(payload * entries / (time.perf_counter() - started))
        for number, each in enumerate(found):
            got = each.tensor.view(torch.uint8).flatten()[:payload] if each is not None else None
            right = right and got is not None and bool((got == pattern + number).all())
            if each is not None:
                each.ref_count_down()
        for key in keys:
            disk.remove(key)
    direct = payload % os.statvfs(directory).f_bsize == 0
    disk.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    return {
        "version": importlib.metadata.version("lmcache"),
        "write_unsynced": wrote,
        "write": durable,
        "read": read,
        "right": right,
        "direct": direct,
    }


def sync_files(directory: str) -> None:
    for path in (*(os.path.join(directory, name) for name in os.listdir(directory)), directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop_page_cache(directory: str) -> None:
    """Cold files, where the backend does not read with O_DIRECT."""
    for name in os.listdir(directory):
        descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
