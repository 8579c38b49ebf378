"""A step over freshly laid out sequences, for golden cases that test one part of V4.1 without a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.engine.batch import StepBatch
from headrace.engine.models.deepseek_v41.cache import CacheViews, make_codecs
from headrace.engine.models.deepseek_v41.config import RopeConfig
from headrace.engine.models.deepseek_v41.rows import plan_rows
from headrace.engine.models.deepseek_v41.step import Step, frequencies
from headrace.kernels.modes import NumericMode
from headrace.kernels.select import select
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.pool import KVPool


@dataclass(frozen=True)
class Chunk:
    """New positions of one sequence; sequence i of a step owns slot i + 1 and the next rows of the pool."""

    start: int
    length: int
    keep_from: int = 0


def chunk_batch(layout: KVLayout, chunks: Sequence[Chunk]) -> StepBatch:
    """A text batch without ids that matter."""
    blocks = max(layout.blocks_for(c.start + c.length) for c in chunks)
    positions = [p for c in chunks for p in range(c.start, c.start + c.length)]
    return StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        sequence_of_row=torch.tensor([b for b, c in enumerate(chunks) for _ in range(c.length)]),
        starts=tuple(c.start for c in chunks),
        lengths=tuple(c.length for c in chunks),
        block_tables=1 + torch.arange(len(chunks) * blocks).view(len(chunks), blocks),
        slots=1 + torch.arange(len(chunks)),
        keep_from=tuple(c.keep_from for c in chunks),
        lookback=torch.zeros((len(chunks), 0), dtype=torch.int64),
        image_mask=torch.zeros(len(positions), dtype=torch.bool),
        image_embeddings=None,
        logit_rows=torch.zeros(0, dtype=torch.int64),
    )


def chunk_step(layout: KVLayout, pool: KVPool, chunks: Sequence[Chunk]) -> Step:
    """One step over ``chunks``; rotary tables are of 32 channels, base 10,000."""
    batch = chunk_batch(layout, chunks)
    codecs = make_codecs(layout, NumericMode.NOQUANT, select(torch.device("cpu")).ops)
    rope = frequencies(RopeConfig(10000.0, 32, 0, 1.0, 0.0, 0.0), torch.device("cpu"))
    rows = plan_rows(batch, layout)
    return Step(rows, CacheViews(pool, codecs), batch.block_tables, rope, rope, None)
