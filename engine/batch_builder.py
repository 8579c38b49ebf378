"""A step plan becomes the tensors of one forward pass, in static buffers.

Buffers are allocated once at their largest size and handed out as views, so a captured graph may read the same
addresses every step. A step of decode rows alone can be padded to a bucket: padded sequences stand on the reserved
row and slot.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from headrace.engine.batch import IMAGE_TOKEN, PAD_TOKEN, StepBatch
from headrace.engine.model import Model
from headrace.engine.scheduler import Chunk, StepPlan
from headrace.engine.sequence import Sequence
from headrace.kvcache.pool import KVPool


class _Buffer:
    """A device tensor and its host side: the same memory on the CPU, pinned host memory beside a GPU."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self.device = torch.zeros(shape, dtype=dtype, device=device) if pinned else self.host
        self.array = self.host.numpy()

    def view(self, *sizes: int) -> torch.Tensor:
        """The leading `sizes` of the device tensor, after the host side's values were sent."""
        index = tuple(slice(size) for size in sizes)
        target = self.device[index]
        if self.device is not self.host:
            target.copy_(self.host[index], non_blocking=True)
        return target


class BatchBuilder:
    """Builds one StepBatch at a time: the next build overwrites the last one's tensors."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        *,
        max_tokens: int,
        max_sequences: int,
        buckets: Seq[int] = (),
        widths: Seq[int] = (),
        mask_replay: bool = False,
    ) -> None:
        """Sizes to which steps of decode rows alone are padded: `buckets` sequence counts, `widths` block table widths
        (the largest one is used where none fits). Empty pads nothing."""
        self._mask_replay = mask_replay
        self._model = model
        self._buckets = tuple(sorted(buckets))
        self._widths = tuple(sorted(widths))
        self._max_blocks = pool.layout.blocks_for(model.context_tokens + 1)
        device = pool.device
        self._token_ids = _Buffer((max_tokens,), torch.int64, device)
        self._positions = _Buffer((max_tokens,), torch.int64, device)
        self._sequence_of_row = _Buffer((max_tokens,), torch.int64, device)
        self._block_tables = _Buffer((max_sequences, self._max_blocks), torch.int64, device)
        self._slots = _Buffer((max_sequences,), torch.int64, device)
        self._lookback = _Buffer((max_sequences, model.lookback_tokens), torch.int64, device)
        self._image_mask = _Buffer((max_tokens,), torch.bool, device)
        self._logit_rows = _Buffer((max_sequences,), torch.int64, device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """Behind the last build's copies to the device, which may run long after they were queued."""

    def build(self, plan: StepPlan) -> StepBatch:
        """Inputs of the plan's forward pass; S = one row per chunk that samples, in the plan's order."""
        if self._sent is not None:
            self._sent.synchronize()
        chunks = plan.chunks
        padded = self._padded(chunks)
        row = 0
        logit_rows: list[int] = []
        self._image_mask.array[: plan.num_tokens + padded] = False
        embeddings: list[torch.Tensor] = []
        for index, chunk in enumerate(chunks):
            end = row + chunk.length
            self._token_ids.array[row:end] = chunk.sequence.tokens(chunk.start, chunk.end)
            self._positions.array[row:end] = range(chunk.start, chunk.end)
            self._sequence_of_row.array[row:end] = index
            self._fill_sequence(index, chunk)
            embeddings += self._mark_images(chunk, row)
            if chunk.choices:
                logit_rows.append(end - 1)
            row = end
        for index in range(len(chunks), len(chunks) + padded):
            self._pad_sequence(index, row)
            row += 1
        count = len(chunks) + padded
        width = self._width(chunks, padded)
        self._logit_rows.array[: len(logit_rows)] = logit_rows
        batch = StepBatch(
            token_ids=self._token_ids.view(row),
            positions=self._positions.view(row),
            sequence_of_row=self._sequence_of_row.view(row),
            starts=(*(chunk.start for chunk in chunks), *(0,) * padded),
            lengths=(*(chunk.length for chunk in chunks), *(1,) * padded),
            block_tables=self._block_tables.view(count, width),
            slots=self._slots.view(count),
            keep_from=(*(chunk.sequence.live.replay.keep_from for chunk in chunks), *(0,) * padded),
            lookback=self._lookback.view(count, self._model.lookback_tokens),
            image_mask=self._image_mask.view(row),
            image_embeddings=torch.cat(embeddings) if embeddings else None,
            logit_rows=self._logit_rows.view(len(logit_rows)),
            mask_replay=self._mask_replay,
        )
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._token_ids.device.device))
        return batch

    def _width(self, chunks: tuple[Chunk, ...], padded: int) -> int:
        """Columns of the block table: as many as the longest sequence has, or the next size where steps are padded."""
        longest = max(len(chunk.sequence.blocks) for chunk in chunks)
        if not self._widths or any(chunk.length > 1 for chunk in chunks):
            return self._max_blocks if padded else longest
        return next((size for size in self._widths if size >= longest), self._max_blocks)

    def _padded(self, chunks: tuple[Chunk, ...]) -> int:
        if any(chunk.length > 1 for chunk in chunks):
            return 0
        bucket = next((size for size in self._buckets if size >= len(chunks)), len(chunks))
        return bucket - len(chunks)

    def _fill_sequence(self, index: int, chunk: Chunk) -> None:
        sequence = chunk.sequence
        table = self._block_tables.array[index]
        table[: len(sequence.blocks)] = sequence.blocks
        table[len(sequence.blocks) :] = 0
        self._slots.array[index] = sequence.slot
        if self._model.lookback_tokens:
            self._lookback.array[index] = lookback(sequence, chunk.start, self._model.lookback_tokens)

    def _pad_sequence(self, index: int, row: int) -> None:
        self._token_ids.array[row] = 0
        self._positions.array[row] = 0
        self._sequence_of_row.array[row] = index
        self._block_tables.array[index] = 0
        self._slots.array[index] = 0
        self._lookback.array[index] = PAD_TOKEN

    def _mark_images(self, chunk: Chunk, row: int) -> list[torch.Tensor]:
        """Mark the chunk's image positions, and give their embedding rows in order."""
        parts: list[torch.Tensor] = []
        for image in chunk.sequence.live.request.images:
            start, end = max(image.start, chunk.start), min(image.end, chunk.end)
            if start >= end:
                continue
            if image.embeddings is None:
                raise ValueError(f"{chunk.sequence.owner}: image at {image.start} has no embeddings on this worker")
            self._image_mask.array[row + start - chunk.start : row + end - chunk.start] = True
            parts.append(image.embeddings[start - image.start : end - image.start].to(self._image_mask.device.device))
        return parts


def lookback(sequence: Sequence, start: int, count: int) -> list[int]:
    """Ids of the `count` positions before `start`, oldest first, with PAD_TOKEN and IMAGE_TOKEN where they apply."""
    images = sequence.live.request.images
    ids: list[int] = []
    for position in range(start - count, start):
        if position < 0:
            ids.append(PAD_TOKEN)
        elif any(image.start <= position < image.end for image in images):
            ids.append(IMAGE_TOKEN)
        else:
            ids.append(sequence.token(position))
    return ids
