"""From a worker's settings to a loaded model, its pool and an engine: the slow part of a start, off the event loop.

Weights outlive a change of role, the pool does not (lives.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.engine.core import Engine
from headrace.engine.fingerprint import model_fingerprint
from headrace.engine.loading import folder_dtype, load_model, read_config
from headrace.engine.masks.grammars import Grammars
from headrace.engine.model import Model
from headrace.engine.offline import make_pool
from headrace.engine.roles import Role
from headrace.engine.text.tokenizer import Tokenizer
from headrace.kvcache.pool import KVPool
from headrace.kvcache.tier.types import TierSink
from headrace.kvcache.transfer.regions import MemoryRegion
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.registry.base import Capacity
from headrace.services.worker.settings import WorkerSettings
from headrace.services.worker.spec_wire import ModelFacts

ROWS = "rows"
SLOTS = "slots"
"""Names under which a pool's memory is registered for sending."""


@dataclass(frozen=True)
class LoadedWeights:
    """A model and what it is, whatever the role."""

    model: Model
    tokenizer: Tokenizer | None
    model_fp: bytes


@dataclass(frozen=True)
class LoadedModel:
    """A model, what it is, and the pool for it."""

    model: Model
    tokenizer: Tokenizer | None
    pool: KVPool
    facts: ModelFacts
    grammars: Grammars
    """Languages that requests are held to, compiled. Its process ends with this one."""

    def engine(
        self, settings: WorkerSettings, role: Callable[[Engine], Role], clock: Clock, tier: TierSink | None = None
    ) -> Engine:
        """An engine of this role over the pool; `tier` takes what it computes."""
        return Engine(
            self.model, self.pool, settings.engine, role, clock=clock.monotonic, tokenizer=self.tokenizer, tier=tier
        )

    def source_regions(self) -> tuple[MemoryRegion, ...]:
        """The pool's memory as peers are sent from it; nobody may write there (L7)."""
        regions = [MemoryRegion(ROWS, self.pool.rows)]
        if self.pool.layout.slot_bytes:
            regions.append(MemoryRegion(SLOTS, self.pool.slots))
        return tuple(regions)

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token alone; empty without a tokenizer."""
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token)

    def capacity(self, settings: WorkerSettings) -> Capacity:
        """For the registry."""
        pool = self.pool
        return Capacity(
            rows=pool.row_region.capacity,
            slots=settings.engine.max_sequences,
            snapshots=pool.snapshot_region.capacity,
            block_tokens=pool.layout.block_tokens,
            queue_requests=settings.engine.max_waiting,
            context_tokens=self.model.context_tokens,
            row_bytes=pool.layout.block_bytes,
            slot_bytes=pool.layout.slot_bytes,
        )


def load(settings: WorkerSettings, folder: Path) -> LoadedModel:
    """Load everything. Takes seconds for big models; called on a thread. Raises ModelError, TooLittleMemory."""
    return with_pool(load_weights(settings, folder), settings)


def load_weights(settings: WorkerSettings, folder: Path) -> LoadedWeights:
    """The slow half of `load`. Raises ModelError."""
    model = load_model(folder, settings.load)
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    identity = settings.load.numeric_identity(folder_dtype(read_config(folder)))
    return LoadedWeights(model, tokenizer, model_fingerprint(folder, identity))


def with_pool(weights: LoadedWeights, settings: WorkerSettings) -> LoadedModel:
    """A pool of the role's size. Raises TooLittleMemory."""
    layout = weights.model.layout
    facts = ModelFacts(
        name=settings.model.name,
        model_fp=weights.model_fp,
        layout_fp=layout.fingerprint,
        row_fp=layout.row_fingerprint,
        replay=settings.engine.replay,
        bounded_replay=layout.has_snapshots,
    )
    model, tokenizer = weights.model, weights.tokenizer
    grammars = Grammars(tokenizer, model.vocab_size, model.eos_token_ids, settings.engine)
    return LoadedModel(model, tokenizer, make_pool(model, settings.engine), facts, grammars)
