"""Loading a request's prefix before the request is queued: engine and tier loader brought together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.tier_messages import Adopt, Adoption, BeginLoad, EndLoad
from headrace.engine.tier_writes import RETENTION
from headrace.kvcache.entries import EntryKind
from headrace.kvcache.keys import Key, snapshot_key
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.tier.loader import TierLoader
from headrace.kvcache.tier.plan import Wanted
from headrace.kvcache.tier.types import PrefixUse
from headrace.kvcache.tier.writer import TierWriter
from headrace.services.worker.engine_link import EngineLink

SPEED_MEMORY = 0.2
"""Weight of the newest measurement of prefill's speed."""


@dataclass(frozen=True)
class Preloaded:
    """What loading did for one request."""

    nbytes: int = 0
    reason: str = "none"
    """LoadOutcome.reason; `none`: the tier was not asked."""
    seconds: float = 0.0


class PrefillSpeed:
    """Seconds to compute a prompt token, as measured."""

    def __init__(self) -> None:
        self.token_seconds: float | None = None

    def measured(self, tokens: int, seconds: float) -> None:
        """A prompt's chunks took so long, with whatever ran beside it."""
        if tokens < 1 or seconds <= 0:
            return
        fresh, known = seconds / tokens, self.token_seconds
        self.token_seconds = fresh if known is None else (1 - SPEED_MEMORY) * known + SPEED_MEMORY * fresh


class Preloader:
    """Made on the event loop's thread; `load` may be awaited for many requests at once."""

    def __init__(
        self, link: EngineLink, loader: TierLoader, writer: TierWriter, layout: KVLayout, max_loads: int
    ) -> None:
        self._link = link
        self._loader = loader
        self._writer = writer
        self._layout = layout
        self._threads = ThreadPoolExecutor(max_loads, thread_name_prefix="tier-load")
        self.loading = 0
        """Loads under way."""
        self.observe: Callable[[str, float], None] = lambda outcome, seconds: None
        """Told how each load ended and how long its request waited for it."""

    async def load(self, request: EngineRequest) -> Preloaded:
        """Bring what the tiers have of the request's prefix into the pool, held for it. Raises EngineError with the
        engine's refusal of the request; a failure of a tier is only a shorter prefix (L17).

        From here on the engine has a load of this request: it ends with the request's admission or end, or by `drop`.
        """
        if request.cache is None:
            return Preloaded()
        began = time.monotonic()
        self.loading += 1
        try:
            plan = await self._link.call(BeginLoad(request))
            tokens, nbytes, reason = plan.usable_tokens, 0, "cached"
            if plan.usable_tokens < len(plan.keys) * self._layout.block_tokens:
                work = self._threads.submit(
                    self._loader.load,
                    plan,
                    _EnginePool(self._link, request),
                    asked_at=began,
                    not_after=float("inf") if request.deadline is None else request.deadline,
                )
                outcome = await asyncio.wrap_future(work)
                tokens, nbytes, reason = outcome.tokens, outcome.nbytes, outcome.reason
        except BaseException:
            self.drop(request.key)
            raise
        finally:
            self.loading -= 1
        self._note_use(request, plan, tokens)
        spent = time.monotonic() - began
        self.observe(reason, spent)
        return Preloaded(nbytes, reason, spent)

    def drop(self, key: RequestKey) -> None:
        """The request will not come: let go of what was loaded for it. Idempotent; nothing after its admission."""
        self._link.post(EndLoad(key))

    def close(self) -> None:
        """No request comes any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _note_use(self, request: EngineRequest, plan: Wanted, tokens: int) -> None:
        """A used prefix lives on, in every tier that has it, blocks and snapshot (spec/kv_tier.md, Retention)."""
        count = tokens // self._layout.block_tokens
        if count == 0 or request.cache is None:
            return
        blocks, layout = plan.keys[:count], self._layout
        self._writer.used(
            PrefixUse(
                scope=request.cache,
                retention=RETENTION.get(request.traffic),
                root=request.key_root,
                blocks=blocks,
                block_tokens=layout.block_tokens,
                snapshot=snapshot_key(blocks[-1], layout.ring_tokens) if layout.has_snapshots else None,
            )
        )


class _EnginePool:
    """PoolSide of one request's load."""

    def __init__(self, link: EngineLink, request: EngineRequest) -> None:
        self._link = link
        self._key = request.key

    def adopt(self, entries: Sequence[tuple[Key, EntryKind, memoryview]]) -> Future[int]:
        return self._link.submit(Adopt(self._key, tuple(Adoption(*entry) for entry in entries)))
