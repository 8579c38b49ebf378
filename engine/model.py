"""What every model family offers the engine, and how a model folder becomes one."""

from __future__ import annotations

from typing import Protocol

import torch

from headrace.engine.batch import StepBatch
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.pool import KVPool


class Model(Protocol):
    """A loaded model. It holds weights only; all state of requests lies in the pool's rows and slots."""

    layout: KVLayout
    device: torch.device
    """Where weights lie and the pool must."""
    supports_replay: bool
    """Whether bounded replay may skip the consumer layers; without it the engine serves the model with replay off."""
    vocab_size: int
    hidden_size: int
    context_tokens: int
    """Largest number of positions a sequence may have."""
    lookback_tokens: int
    """Ids before a chunk that the model reads (V4.1's Engram: max n-gram − 1); 0 for V3."""
    image_token_id: int | None
    """Placeholder id of image positions, or None for a text model."""
    eos_token_ids: tuple[int, ...]

    def forward(self, batch: StepBatch, pool: KVPool) -> torch.Tensor:
        """Write the batch's KV into the pool's rows and slots; return logits [S, vocab_size] float32."""
        ...
