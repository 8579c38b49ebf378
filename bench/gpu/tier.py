"""The cache tier under an engine on a device: prompts computed once, kept in host memory and on disk, loaded into an
empty pool, answered beside the same requests without a cache."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.gpu.compare import TokenCheck, compare_tokens
from bench.gpu.tiny import mixed_requests
from headrace.engine.core import Engine
from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.model import Model
from headrace.engine.offline import Completion, OfflineEngine
from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.settings import EngineSettings
from headrace.engine.tier_messages import Adopt, Adoption, BeginLoad, TierSink, TierUnpin
from headrace.kvcache.entries import EntryKind, TierSource
from headrace.kvcache.host.arena import arena_shape
from headrace.kvcache.host.tier import HostTier
from headrace.kvcache.index.sqlite import SqliteIndex
from headrace.kvcache.keys import Key
from headrace.kvcache.memory import buffer_of, host_slabs
from headrace.kvcache.pool import KVPool
from headrace.kvcache.store.base import Store
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.settings import SegmentSettings
from headrace.kvcache.tier.load import LoadSettings
from headrace.kvcache.tier.loader import TierLoader
from headrace.kvcache.tier.types import CacheScope
from headrace.kvcache.tier.writer import TierWriter

HOST_BYTES = 256 << 20
PATIENCE_S = 60.0
SCOPE = CacheScope(b"n" * 32, b"t" * 16)


@dataclass
class TierRun:
    """Prefixes loaded from one tier."""

    source: str
    tokens: TokenCheck
    loaded_tokens: int
    computed_tokens: int
    nbytes: int
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.tokens.ok and not self.problems


def check_tier(folder: Path, device: str, *, longest: int, tokens: int, block: int = 16) -> list[TierRun]:
    """Fill both tiers from one engine, then load from each into an engine of its own."""
    requests = [replace(request, cache=SCOPE) for request in mixed_requests(longest, tokens)]
    model = load_model(folder, ModelSettings(device=device, dtype="auto", block_tokens=block))
    plain = _engine(model, device, requests, EngineSettings(prefix_reuse=False, max_sequences=4))
    expected = plain.generate(requests)
    layout = model.layout
    shape = arena_shape(HOST_BYTES, layout.block_bytes, layout.snapshot_bytes)
    host = HostTier(buffer_of(host_slabs(shape.slabs, shape.slab_bytes)), shape)
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-tier-") as directory:
        # Not by its URL: that would want the clients of every other store.
        index = SqliteIndex(Path(directory) / "index.sqlite")
        store = SegmentStore(PosixFileLayer(Path(directory)), index, SegmentSettings())
        try:
            problems = _fill(model, device, requests, host, store)
            runs = [_load(model, device, requests, source, expected) for source in (host, store)]
        finally:
            store.close()
    runs[0].problems += problems + list(host.integrity().problems)
    return runs


def _engine(
    model: Model, device: str, requests: Sequence[EngineRequest], settings: EngineSettings, tier: TierSink | None = None
) -> OfflineEngine:
    longest = max(request.prompt_length + request.max_tokens for request in requests)
    rows = (len(requests) + 2) * (model.layout.blocks_for(longest) + 1)
    pool = KVPool(
        model.layout, num_rows=rows + 1, num_slots=settings.max_sequences + 1, num_snapshots=64, device=device
    )
    return OfflineEngine(model, settings, pool=pool, tier=tier)


def _fill(model: Model, device: str, requests: Sequence[EngineRequest], host: HostTier, store: Store) -> list[str]:
    """Compute every prompt with a writer attached; what is wrong afterwards."""
    settings = EngineSettings(max_sequences=8, max_batched_tokens=4096, write_fraction=0.5)
    writers: list[TierWriter] = []
    engine = _engine(model, device, requests, settings, lambda write: writers[0](write))
    pins: list[str] = []
    writer = TierWriter(engine.pool, host=host, store=store, unpin=pins.extend)
    writers.append(writer)
    writer.start()
    engine.generate(requests)
    closed = writer.close(PATIENCE_S)
    engine.engine.apply(TierUnpin(tuple(pins)))
    problems = list(engine.engine.integrity(idle=True))
    problems += [] if closed else ["the writer did not end"]
    problems += [] if store.flush(PATIENCE_S) else ["the store did not become durable"]
    stats = writer.stats()
    if stats.failed or stats.lost:  # refused: prompts that share blocks offer them while the first copy is under way
        problems.append(f"writes failed: {stats}")
    counts = engine.engine.memory.writes.counts
    if not counts.offered_blocks or counts.dropped_blocks:
        problems.append(f"blocks were not offered or were dropped: {counts}")
    return problems


def _load(
    model: Model, device: str, requests: Sequence[EngineRequest], source: TierSource, expected: Sequence[Completion]
) -> TierRun:
    """Each request alone on an engine that has only what this source brings."""
    settings = EngineSettings(max_sequences=8, max_batched_tokens=4096)
    loader = TierLoader([source], model.layout, LoadSettings(deadline_s=PATIENCE_S, least_tokens=0, break_even=False))
    got: list[Completion] = []
    nbytes, problems = 0, list[str]()
    try:
        for request in requests:
            engine = _engine(model, device, requests, settings)
            with _loaded(engine.engine, request, loader) as brought:
                got += engine.generate([request])
            nbytes += brought
            problems += engine.engine.integrity(idle=True)
    finally:
        loader.close()
    loaded = sum(completion.counts.loaded for completion in got)
    if not loaded:
        problems.append("nothing was loaded")
    computed = sum(completion.counts.computed for completion in got)
    return TierRun(source.name, compare_tokens(expected, got), loaded, computed, nbytes, problems)


@contextmanager
def _loaded(engine: Engine, request: EngineRequest, loader: TierLoader) -> Iterator[int]:
    """The request's prefix is in the pool, held for it; yields the bytes that came."""
    plan = engine.apply(BeginLoad(request))
    yield loader.load(plan, _Adopter(engine, request.key), asked_at=time.monotonic()).nbytes


class _Adopter:
    """PoolSide of an engine that runs on the caller's own thread."""

    def __init__(self, engine: Engine, key: RequestKey) -> None:
        self._engine = engine
        self._key = key

    def adopt(self, entries: Sequence[tuple[Key, EntryKind, memoryview]]) -> Future[int]:
        done: Future[int] = Future()
        done.set_result(self._engine.apply(Adopt(self._key, tuple(Adoption(*entry) for entry in entries))))
        return done
