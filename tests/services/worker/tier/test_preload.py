"""Loading before a request is queued, with a real engine on its thread: what it leaves behind (L6, L10, L11)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from headrace.engine.core import Engine
from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.messages import CheckIntegrity, Submit, Usage
from headrace.engine.tier_messages import TierUnpin
from headrace.kvcache.entries import EntryKind
from headrace.kvcache.tier.load import LoadSettings
from headrace.kvcache.tier.loader import TierLoader
from headrace.kvcache.tier.types import CacheScope
from headrace.kvcache.tier.writer import TierWriter
from headrace.services.worker.engine_link import EngineLink
from headrace.services.worker.tier.preload import Preloader
from tests.engine.conftest import Kit, ToyModel
from tests.kvcache.tier.fakes import FakeSource, FakeStore

SCOPE = CacheScope(bytes(range(32)), bytes(16))
KIT = Kit()
PATIENCE_S = 60.0


@dataclass
class Desk:
    """An engine on its thread, a writer into a fake store, and a preloader from one source."""

    engine: Engine
    link: EngineLink
    store: FakeStore
    source: FakeSource
    preloader: Preloader
    writer: TierWriter
    usages: dict[str, Usage]

    async def answer(self, request: Any) -> Usage:
        """Run a request to its end."""
        await self.link.call(Submit(request))
        async with asyncio.timeout(PATIENCE_S):
            while request.key.request_id not in self.usages:  # noqa: ASYNC110 - events come by a callback
                await asyncio.sleep(0.005)
        return self.usages[request.key.request_id]

    async def idle(self) -> tuple[str, ...]:
        """What is held or pinned though it should not be, once the writer has copied what it was offered."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.writer.idle:  # noqa: ASYNC110 - it has a thread of its own
                await asyncio.sleep(0.005)
        return await self.link.call(CheckIntegrity(idle=True))


@asynccontextmanager
async def desk(source: FakeSource | None = None, **settings: Any) -> AsyncIterator[Desk]:
    store, usages = FakeStore(), dict[str, Usage]()
    model = ToyModel(slots=True)
    engine = KIT.engine(model, tier=lambda write: writer(write), clock=time.monotonic, **settings)  # type: ignore[arg-type]

    def on_events(events: Sequence[Any]) -> None:
        usages.update({event.key.request_id: event for event in events if isinstance(event, Usage)})

    link = EngineLink(engine, on_events, threads=0)
    writer = TierWriter(engine.pool, host=None, store=store, unpin=lambda pins: link.submit(TierUnpin(pins)))
    source = source or FakeSource()
    deadline_s = PATIENCE_S if source.gate is None else 0.3  # which one that hangs is waited for
    loader = TierLoader([source], model.layout, LoadSettings(deadline_s=deadline_s, least_tokens=0))
    preloader = Preloader(link, loader, writer, model.layout, max_loads=4)
    writer.start()
    link.start()
    try:
        yield Desk(engine, link, store, source, preloader, writer, usages)
    finally:
        if source.gate is not None:
            source.gate.set()
        await link.stop()
        preloader.close()
        loader.close()
        assert writer.close(PATIENCE_S)


async def filled() -> tuple[Any, FakeSource]:
    """A request, and a source that holds its prefix."""
    kept = FakeSource()
    request = KIT.request("filled", 100, cache=SCOPE, max_tokens=1)
    engine = KIT.engine(ToyModel(slots=True), tier=lambda write: writes.append(write))
    writes: list[Any] = []
    engine.apply(Submit(request))
    KIT.run(engine)
    for write in writes:
        for row in write.blocks:
            kept.add(row.key, EntryKind.BLOCK, row.tokens, engine.pool.rows[row.place].numpy().tobytes())
        for row in write.snapshots:
            kept.add(row.key, EntryKind.SNAPSHOT, row.tokens, engine.pool.snapshots[row.place].numpy().tobytes())
    return request, kept


@pytest.mark.asyncio
async def test_what_is_loaded_is_counted_and_told() -> None:
    """L27: the request's own admission finds it; the prefix counts as used in the store."""
    request, source = await filled()
    async with desk(source) as at:
        loaded = await at.preloader.load(request)
        layout = at.engine.pool.layout
        assert (loaded.reason, loaded.nbytes) == ("loaded", 5 * layout.block_bytes + layout.snapshot_bytes)
        assert await at.idle() != ()
        counts = (await at.answer(request)).counts
        assert (counts.cached, counts.loaded, counts.computed) == (0, 80, 20)
        assert await at.idle() == ()
        async with asyncio.timeout(PATIENCE_S):
            while not at.store.touched:  # noqa: ASYNC110 - told on the writer's thread
                await asyncio.sleep(0.005)
        ((keys, _),) = at.store.touched
        assert len(keys) == 6


@pytest.mark.asyncio
async def test_a_load_that_is_left_lets_go() -> None:
    """L10: a run that is cancelled while its prefix is on the way leaves nothing behind, whatever the source does."""
    request, source = await filled()
    source.gate = threading.Event()
    async with desk(source) as at:
        loading = asyncio.create_task(at.preloader.load(request))
        while not len(at.engine.memory.loads):  # noqa: ASYNC110 - the engine's thread begins it
            await asyncio.sleep(0.005)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert await at.idle() == ()
        assert at.preloader.loading == 0


@pytest.mark.asyncio
async def test_a_source_that_hangs_costs_its_deadline() -> None:
    """L17: the request goes on without it, and the engine has no load of it afterwards but the admission's."""
    request, source = await filled()
    source.gate = threading.Event()
    async with desk(source) as at:
        loaded = await at.preloader.load(request)
        assert (loaded.nbytes, loaded.reason) == (0, "absent")
        counts = (await at.answer(request)).counts
        assert (counts.loaded, counts.computed) == (0, 100)
        assert await at.idle() == ()


@pytest.mark.asyncio
async def test_the_engine_refuses_what_it_would_refuse_anyway() -> None:
    """L10: a bad request is refused before anything is read; a request without a namespace is not looked up."""
    _, source = await filled()
    async with desk(source) as at:
        with pytest.raises(EngineError) as refused:
            await at.preloader.load(KIT.request("bad", [10**9], cache=SCOPE))
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT
        assert (await at.preloader.load(KIT.request("filled", 100))).reason == "none"
        assert source.looked_up == 0
        assert await at.idle() == ()
