"""Copy what the engine offers to the host tier and the store, on a thread of its own.

The engine waits for nothing here: it pins what it offers, boundedly, and this thread unpins it as soon as the bytes are
copied. What the store has already is not copied again but touched, which prolongs its life.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from headrace.kvcache.entries import EntryInfo, EntryKind, payload_digest
from headrace.kvcache.keys import Key
from headrace.kvcache.pool import KVPool
from headrace.kvcache.store.base import PutEntry, Store
from headrace.kvcache.tier.copies import PoolReader
from headrace.kvcache.tier.stats import WriterStats
from headrace.kvcache.tier.types import Lacking, PrefixUse, TierWrite, WriteRow

logger = logging.getLogger(__name__)

LOOKUP_S = 0.25
"""Longest wait for the store's index; without its answer everything is copied, and the store refuses what it has."""
READY_POLL_S = 0.0005
MAX_USES = 1024
"""Prefixes whose use waits to be told; older ones are forgotten, which costs them life and nothing else."""
BATCH_BYTES = 8 << 20
"""Copied before they are handed to the store, so that the bytes held twice are bounded."""


class HostSide(Protocol):
    """What the writer needs of the host tier."""

    def wants(self, key: Key) -> bool:
        """Whether a put would copy anything."""
        ...

    def put(self, info: EntryInfo, payload: memoryview) -> bool:
        """Copy an entry in."""
        ...

    def touch(self, keys: Sequence[Key]) -> None:
        """A prefix was used from the device pool."""
        ...


class TierWriter:
    """A TierSink. `host` and `store` may be absent, each by itself."""

    def __init__(
        self,
        pool: KVPool,
        *,
        host: HostSide | None,
        store: Store | None,
        unpin: Callable[[tuple[str, ...]], None],
        offer: Callable[[Lacking], None] = lambda lacking: None,
    ) -> None:
        """`unpin`, and `offer`, which asks the engine to offer what a used prefix lacks in the store, are called on
        this object's thread and must not block."""
        self._pool = pool
        self._host = host
        self._store = store
        self._unpin = unpin
        self._offer = offer
        self._work: deque[TierWrite] = deque()
        self._uses: deque[PrefixUse] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._busy = False
        self._counts: Counter[str] = Counter()
        self._in_flight = 0
        self._thread = threading.Thread(target=self._run, name="tier-writer", daemon=True)

    # --- from other threads ----------------------------------------------------------------------------------------

    def __call__(self, write: TierWrite) -> None:
        """Take an offer; the engine's thread. Never blocks."""
        with self._wake:
            self._work.append(write)
            self._wake.notify()

    def used(self, use: PrefixUse) -> None:
        """A prefix is in use: it lives on in every tier, and what the store lacks of it is offered again."""
        with self._wake:
            self._uses.append(use)
            if len(self._uses) > MAX_USES:
                self._uses.popleft()
                self._counts["uses_dropped"] += 1
            self._wake.notify()

    @property
    def idle(self) -> bool:
        """Every offer has been copied and unpinned."""
        with self._wake:
            return not (self._work or self._busy)

    def stats(self) -> WriterStats:
        with self._wake:
            return WriterStats(**self._counts, queued=len(self._work), in_flight=self._in_flight)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Copy what was offered, then end the thread; False when it took too long (L6). Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- this thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.set_device(self._pool.device)
        reader = PoolReader(self._pool)
        while True:
            with self._wake:
                while not (self._work or self._uses or self._stopping):
                    self._wake.wait()
                write = self._work.popleft() if self._work else None
                use = self._uses.popleft() if write is None and self._uses else None
                if write is None and use is None:
                    return
                self._busy = write is not None
            try:
                if write is not None:
                    self._write(write, reader)
                elif use is not None:
                    self._note_use(use)
            except Exception:
                # L17: a tier that fails is a cache that misses; the worker goes on.
                logger.exception("the cache tier could not be written")
                self._count(failed=1)
            finally:
                if write is not None:
                    self._unpin((write.pin,))
                    with self._wake:
                        self._busy = False

    def _note_use(self, use: PrefixUse) -> None:
        if self._host is not None:
            self._host.touch(use.keys)
        if self._store is None or use.retention is None:
            return
        self._store.touch(use.keys, use.retention, use.scope.tenant_tag)
        there = self._store.lookup(use.keys, time.monotonic() + LOOKUP_S)
        missing = {key for key, has in zip(use.keys, there, strict=True) if not has}
        parents = (use.root, *use.blocks)
        blocks = tuple(
            (key, parents[index], (index + 1) * use.block_tokens)
            for index, key in enumerate(use.blocks)
            if key in missing
        )
        snapshots: tuple[tuple[Key, Key, int], ...] = ()
        if use.snapshot is not None and use.snapshot in missing:
            snapshots = ((use.snapshot, use.blocks[-1], len(use.blocks) * use.block_tokens),)
        if blocks or snapshots:
            self._offer(Lacking(use.scope, use.retention, blocks, snapshots))

    def _write(self, write: TierWrite, reader: PoolReader) -> None:
        while write.ready is not None and not write.ready.query():
            time.sleep(READY_POLL_S)
        self._count(blocks=len(write.blocks), snapshots=len(write.snapshots))
        rows = (*write.blocks, *write.snapshots)
        known: set[Key] = set()
        if self._store is not None:
            there = self._store.lookup([row.key for row in rows], time.monotonic() + LOOKUP_S)
            known = {row.key for row, has in zip(rows, there, strict=True) if has}
        for kind, items, chosen in (
            (EntryKind.BLOCK, self._pool.rows, write.blocks),
            (EntryKind.SNAPSHOT, self._pool.snapshots, write.snapshots),
        ):
            self._copy(write, kind, items, [row for row in chosen if self._wanted(row, known)], known, reader)
        if known and self._store is not None:
            self._count(known=len(known))
            keys = [row.key for row in rows if row.key in known]
            self._store.touch(keys, write.retention, write.scope.tenant_tag)

    def _wanted(self, row: WriteRow, known: set[Key]) -> bool:
        in_store = self._store is None or row.key in known
        return not in_store or (self._host is not None and self._host.wants(row.key))

    def _copy(
        self,
        write: TierWrite,
        kind: EntryKind,
        items: torch.Tensor,
        rows: Sequence[WriteRow],
        known: set[Key],
        reader: PoolReader,
    ) -> None:
        """Prefix first, a batch at a time: the store copies a payload before put_many returns, the host tier in put."""
        batch: list[PutEntry] = []
        size = items.shape[1]
        for row, payload in zip(rows, reader.read(items, [row.place for row in rows]), strict=True):
            info = EntryInfo(
                key=row.key,
                kind=kind,
                namespace=write.scope.namespace,
                parent=row.parent,
                tokens=row.tokens,
                length=size,
                digest=payload_digest(payload),
                retention=write.retention,
                tenant_tag=write.scope.tenant_tag,
            )
            self._count(copied_bytes=size)
            if self._host is not None:
                self._count(host_entries=int(self._host.put(info, payload)))
            if self._store is not None and row.key not in known:
                # On a device the view is the staging buffer, which the next batch overwrites.
                kept = payload if self._pool.device.type == "cpu" else bytes(payload)
                batch.append(PutEntry(info, kept))
                if len(batch) * size >= BATCH_BYTES:
                    self._put(batch)
                    batch = []
        self._put(batch)

    def _put(self, batch: list[PutEntry]) -> None:
        if not batch:
            return
        assert self._store is not None
        ticket = self._store.put_many(batch)
        accepted = sum(ticket.accepted)
        self._count(accepted=accepted, refused=len(batch) - accepted)
        if accepted:
            with self._wake:
                self._in_flight += accepted
            ticket.durable.add_done_callback(lambda done: self._durable(done, accepted))

    def _durable(self, done: Future[tuple[bool, ...]], accepted: int) -> None:
        """On a thread of the store."""
        durable = 0 if done.cancelled() or done.exception() is not None else sum(done.result())
        with self._wake:
            self._in_flight -= accepted
            self._counts.update(durable=durable, lost=accepted - durable)

    def _count(self, **counts: int) -> None:
        with self._wake:
            self._counts.update(counts)
