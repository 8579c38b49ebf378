"""Bytes of rows on their way from the device pool to host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from headrace.kvcache.pool import KVPool

STAGING_BYTES = 16 << 20


class PoolReader:
    """Reads pinned rows and snapshots of one pool, off the engine's thread. Used by one thread."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._stream: torch.cuda.Stream | None = None
        self._staging = torch.empty(0, dtype=torch.uint8)
        if pool.device.type == "cuda":
            # Its own stream: the copy waits for the mark of what it reads, and no step waits for the copy.
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
            largest = max(pool.layout.block_bytes, pool.layout.snapshot_bytes)
            self._staging = torch.empty(max(STAGING_BYTES, largest), dtype=torch.uint8, pin_memory=True)

    def read(self, items: torch.Tensor, places: Sequence[int]) -> Iterator[memoryview]:
        """Bytes of `items[place]` for each place, in order; each view is valid until the next is asked for.

        items: `pool.rows` or `pool.snapshots`, whose places the caller has pinned and whose mark has passed.
        """
        if not places:
            return  # a layout without snapshots has places of no bytes
        if self._stream is None:
            array = items.numpy()
            for place in places:
                yield memoryview(array[place])
            return
        size = items.shape[1]
        batch = max(1, self._staging.numel() // size)
        for at in range(0, len(places), batch):
            chosen = places[at : at + batch]
            staged = self._staging[: len(chosen) * size].view(len(chosen), size)
            with torch.cuda.stream(self._stream):
                index = torch.tensor(chosen, dtype=torch.int64).to(items.device)
                staged.copy_(items.index_select(0, index), non_blocking=True)
            self._stream.synchronize()
            array = staged.numpy()
            for row in range(len(chosen)):
                yield memoryview(array[row])
