"""A toy model whose tokens depend on every byte an engine has to get right, and engines around it.

The toy writes each token into a stored ring and a consumer ring of its slot, and into its pool row together with a
digest of the stored window it sees there; the next token's logits come from all that it reads back. A wrong block
table, a stale slot, a missing snapshot, a lost replay bound or a wrong look-back gives other tokens at once, and
everything is exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.batch import IMAGE_TOKEN, PAD_TOKEN, StepBatch
from headrace.engine.core import Engine
from headrace.engine.messages import Event, Finished, FinishReason, Tokens, Usage
from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.roles import WholeRole
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.settings import EngineSettings
from headrace.engine.text.byte_tokenizer import make_byte_tokenizer
from headrace.engine.text.tokenizer import Tokenizer
from headrace.kvcache.layout import KVLayout, v3_layout, v41_layout
from headrace.kvcache.pool import KVPool

BLOCK, WINDOW, BACKTRACKING = 16, 4, 2
KEEP = WINDOW + 2 * BACKTRACKING
WINDOW_BITS = 20
POISON, NOT_A_NUMBER = 5, 6
"""Tokens on which the toy raises, or gives NaN logits (L13)."""
FIRST_LETTER = 3 + ord("a")
ROOT = bytes(32)
FILE = make_byte_tokenizer()


class ToyModel:
    """The Model protocol over real layouts: V3's (rows only) or V4.1's (rows, slots, snapshots)."""

    lookback_tokens = 2
    hidden_size = 4
    context_tokens = 512

    def __init__(self, *, slots: bool) -> None:
        if slots:
            self.layout: KVLayout = v41_layout(
                n_layers=2,
                n_draft_layers=0,
                compress_ratios=(2, 1),
                kv_source_layers=(0, 1),
                head_dim=32,
                index_head_dim=32,
                window=WINDOW,
                backtracking=BACKTRACKING,
                block_tokens=BLOCK,
                entry_format="float32",
            )
        else:
            self.layout = v3_layout(
                num_layers=1, kv_lora_rank=8, qk_rope_head_dim=8, kv_dtype="float32", block_tokens=BLOCK
            )
        self.device = torch.device("cpu")
        self.supports_replay = True
        self.vocab_size = FILE.vocab_size
        self.image_token_id: int | None = FILE.image_token_id
        self.eos_token_ids = (FILE.eos_token_id,)

    def forward(self, batch: StepBatch, pool: KVPool) -> torch.Tensor:
        if POISON in batch.token_ids.tolist():
            raise RuntimeError("poisoned token")
        ring = self.layout.ring_tokens
        rows = pool.rows.view(torch.int64).numpy()
        slots = pool.slots.view(torch.int64).numpy() if ring else None
        ids, mask = batch.token_ids.tolist(), batch.image_mask.tolist()
        wanted = set(batch.logit_rows.tolist())
        logits: list[torch.Tensor] = []
        embeddings = iter(batch.image_embeddings if batch.image_embeddings is not None else ())
        first = 0
        for index in range(batch.num_sequences):
            start, length = batch.starts[index], batch.lengths[index]
            table = batch.block_tables[index].numpy()
            keep = batch.keep_from[index]
            half = self.layout.snapshot_bytes // 8
            cells = None if slots is None else slots[int(batch.slots[index])]
            stored = [] if cells is None else cells[:ring].tolist()
            consumer = [] if cells is None else cells[half : half + ring].tolist()
            before = np.arange(max(start - 2, 0), start)
            self._check_lookback(batch.lookback[index].tolist(), rows[table[before // BLOCK], before % BLOCK].tolist())
            for position in range(start, start + length):
                row = first + position - start
                value = ids[row] + 1
                if mask[row]:
                    value = 1000 + int(next(embeddings).sum())
                window = 0
                if ring:
                    stored[position % ring] = value
                    if position >= keep:
                        consumer[position % ring] = value
                    for back in range(min(WINDOW, position + 1)):
                        window = window * 31 + stored[(position - back) % ring]
                rows[table[position // BLOCK], position % BLOCK] = value << WINDOW_BITS | window % (1 << WINDOW_BITS)
                if row not in wanted:
                    continue
                past = np.arange(position + 1)
                seen = [rows[table[past // BLOCK], past % BLOCK].tolist()]
                if ring:
                    low = max(position - WINDOW + 1, keep, 0)
                    seen.append([consumer[seen_at % ring] for seen_at in range(low, position + 1)])
                logits.append(self._logits(seen))
            if cells is not None:
                cells[:ring], cells[half : half + ring] = stored, consumer
            first += length
        return torch.stack(logits) if logits else torch.zeros(0, self.vocab_size)

    def _check_lookback(self, lookback: list[int], history: list[int]) -> None:
        values = [cell >> WINDOW_BITS for cell in history[-2:]]
        known = [IMAGE_TOKEN if value >= 1000 else value - 1 for value in values]
        assert lookback == [PAD_TOKEN] * (2 - len(known)) + known

    def _logits(self, seen: list[list[int]]) -> torch.Tensor:
        if seen[0][-1] >> WINDOW_BITS == NOT_A_NUMBER + 1:
            return torch.full((self.vocab_size,), float("nan"))
        digest = hashlib.sha256(repr(seen).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        logits = torch.full((self.vocab_size,), -30.0)
        logits[FIRST_LETTER : FIRST_LETTER + 26] = torch.rand(26, generator=generator) * 4
        logits[FILE.eos_token_id] = -1.0
        return logits


class Clock:
    """Injected monotonic time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_request(name: str, prompt: list[int] | int, **changes: Any) -> EngineRequest:
    """`prompt` as a length gives letters that depend on the name alone, so different names share no prefix."""
    if isinstance(prompt, int):
        seed = hashlib.sha256(name.encode()).digest()
        prompt = [FIRST_LETTER + (seed[i % 32] + i * seed[(i + 1) % 32]) % 26 for i in range(prompt)]
    request = EngineRequest(
        key=RequestKey(name, 1),
        prompt_ids=tuple(prompt),
        key_root=ROOT,
        sampling=SamplingParams(temperature=0.0),
        seed=7,
        max_tokens=8,
        ignore_eos=True,
    )
    return replace(request, **changes)


@dataclass
class Outcome:
    """What one request showed its client."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    offsets_ok: bool = True
    finished: dict[int, Finished] = field(default_factory=dict)
    usage: Usage | None = None


def collect(events: list[Event]) -> dict[str, Outcome]:
    """Events by request id, checking order: offsets are dense, nothing follows an end (L28)."""
    outcomes: dict[str, Outcome] = {}
    for event in events:
        outcome = outcomes.setdefault(event.key.request_id, Outcome())
        assert outcome.usage is None, f"{event} follows the usage record"
        match event:
            case Tokens():
                assert event.choice not in outcome.finished, f"{event} follows the terminal event"
                known = outcome.tokens.setdefault(event.choice, [])
                outcome.offsets_ok &= event.offset == len(known)
                known.extend(event.token_ids)
                outcome.text[event.choice] = outcome.text.get(event.choice, "") + event.text
            case Finished():
                assert event.choice not in outcome.finished, f"second terminal event {event}"
                outcome.finished[event.choice] = event
            case Usage():
                outcome.usage = event
    return outcomes


def run(engine: Engine, limit: int = 10_000) -> list[Event]:
    """Step until nothing lives; all events."""
    events: list[Event] = list(engine.drain_events())
    for _ in range(limit):
        if not len(engine.ledger):
            return events
        assert engine.step(), f"stuck: {engine.integrity()}"
        events += engine.drain_events()
    raise AssertionError(f"not done after {limit} steps")


@dataclass(frozen=True)
class Kit:
    """What tests of the engine share, as one fixture."""

    model: Callable[..., ToyModel] = ToyModel
    clock: Callable[[], Clock] = Clock
    request: Callable[..., EngineRequest] = make_request
    collect: Callable[[list[Event]], dict[str, Outcome]] = collect
    run: Callable[..., list[Event]] = run
    tokenizer: Tokenizer = field(default_factory=lambda: Tokenizer(FILE.serialized))
    letter: int = FIRST_LETTER
    poison: int = POISON
    not_a_number: int = NOT_A_NUMBER
    block: int = BLOCK
    keep: int = KEEP
    eos: int = FILE.eos_token_id
    image_token: int = FILE.image_token_id
    done: tuple[FinishReason, ...] = (FinishReason.STOP, FinishReason.LENGTH)

    def engine(
        self,
        model: Any,
        *,
        rows: int = 200,
        clock: Clock | None = None,
        role: Any = WholeRole,
        tier: Any = None,
        **settings: Any,
    ) -> Engine:
        """An engine with a pool of `rows` usable rows."""
        settings = {"max_sequences": 8, "max_batched_tokens": 64, "spill_bytes": 1 << 20, **settings}
        options = EngineSettings(**settings)
        pool = KVPool(model.layout, num_rows=rows + 1, num_slots=options.max_sequences + 1, num_snapshots=64)
        return Engine(model, pool, options, role, clock=clock or Clock(), tokenizer=self.tokenizer, tier=tier)


@pytest.fixture(scope="session")
def kit() -> Kit:
    torch.set_num_threads(1)  # tensors here are tiny; threads only wait for each other
    return Kit()


@pytest.fixture(params=[False, True], ids=["rows", "slots"])
def model(request: pytest.FixtureRequest) -> ToyModel:
    """The toy over both kinds of layout."""
    return ToyModel(slots=request.param)
