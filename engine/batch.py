"""What one forward pass reads: ragged rows of several sequences over pool rows and slots.

Decode rows and prefill chunks are the same thing here: sequence b contributes ``lengths[b]`` new tokens at
positions ``starts[b] … starts[b] + lengths[b] - 1``; their rows stand together, sequences in order. A step may mix
them. A decode step (all lengths 1) has static shapes once padded to a bucket, which is what a captured graph needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAD_TOKEN = -1
"""Look-back entry before position 0."""
IMAGE_TOKEN = -2
"""Look-back entry that is an image position."""


@dataclass(frozen=True)
class StepBatch:
    """Inputs of one forward pass. T rows in all, B sequences, S rows whose logits are wanted.

    All tensors are on the model's device; the host tuples repeat what the host already knows, so that no
    forward pass reads a device tensor back.
    """

    token_ids: torch.Tensor
    """[T] int64; the value at image positions is irrelevant to the model's result."""
    positions: torch.Tensor
    """[T] int64, absolute."""
    sequence_of_row: torch.Tensor
    """[T] int64, row → sequence index."""
    starts: tuple[int, ...]
    """[B] first new position of each sequence; positions before it are in its rows and slot already."""
    lengths: tuple[int, ...]
    """[B] new tokens of each sequence, ≥ 1."""
    block_tables: torch.Tensor
    """[B, max_blocks] int64 pool row of each block, 0 (the reserved row) beyond a sequence's last."""
    slots: torch.Tensor
    """[B] int64 slot of each sequence; all 0 for layouts without slots."""
    keep_from: tuple[int, ...]
    """[B] N₀ − K of bounded replay (spec §18.3): rows at positions ≥ keep_from run the consumer layers and consumer
    windows start there. A value ≤ 0 is the full model."""
    lookback: torch.Tensor
    """[B, model.lookback_tokens] int64 ids of the positions just before ``starts[b]``, oldest first; PAD_TOKEN,
    IMAGE_TOKEN where they apply."""
    image_mask: torch.Tensor
    """[T] bool, true at every position of an image span (delimiters too)."""
    image_embeddings: torch.Tensor | None
    """[I, hidden] rows for the true entries of image_mask, in order; None when there are none."""
    logit_rows: torch.Tensor
    """[S] int64 indices into T. Rows that bounded replay skips have no logits and may not be named."""
    mask_replay: bool = False
    """Bounded replay as ``mask`` (spec §18.3): rows before keep_from run the consumer layers too, under the same
    visibility. Kept rows get the same bytes as without."""

    @property
    def num_sequences(self) -> int:
        return len(self.starts)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]
