"""Decode steps as captured CUDA graphs: hundreds of small kernels become one launch.

A graph is captured once per (sequences, blocks) over the static buffers that `BatchBuilder` fills, the first time such
a step comes, and replayed ever after. Host tuples of a StepBatch only bound shapes in a decode step, so the capture is
given their largest values; what differs between steps comes from the device buffers. Kernels are the eager step's own,
so a replay gives the bytes that the eager step over the same shapes gives.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from headrace.engine.batch import StepBatch
from headrace.engine.model import Model
from headrace.kvcache.pool import KVPool

WARM_UPS = 2
"""Eager runs before a capture: libraries allocate workspaces and constants are uploaded at the first call."""


def powers_of_two(largest: int) -> tuple[int, ...]:
    """1, 2, 4 … and ``largest`` itself: the sizes that decode steps are padded to."""
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return (*sizes, largest) if largest > 1 else (1,)


@contextmanager
def no_collection() -> Iterator[None]:
    """No automatic collection of garbage, in any thread: graphs of an engine that is gone may be in it, and their
    destruction spoils a capture that goes on."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, eq=False)
class _Captured:
    """A graph with the tensors it reads and writes: their memory is its own as long as it is replayed."""

    graph: torch.cuda.CUDAGraph
    inputs: StepBatch
    logits: torch.Tensor


class DecodeGraphs:
    """Captured decode steps of one model over one pool. Used by the engine thread only."""

    def __init__(self, model: Model, pool: KVPool) -> None:
        self._model = model
        self._pool = pool
        self._memory = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[int, int], _Captured] = {}

    @property
    def captured(self) -> int:
        """Graphs held, for status reports."""
        return len(self._captured)

    def serves(self, batch: StepBatch) -> bool:
        """Whether this is a step that a graph may replay: one row of text per sequence, none cut off by bounded replay
        (then host numbers decide what runs)."""
        window = self._pool.layout.window
        return (
            batch.num_tokens == batch.num_sequences
            and batch.image_embeddings is None
            and all(
                keep <= 0 or start - window + 1 >= keep
                for start, keep in zip(batch.starts, batch.keep_from, strict=True)
            )
        )

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Logits [S, vocab] of the batch's leading S rows. They are overwritten by the next call of the same shape."""
        key = (batch.num_sequences, batch.block_tables.shape[1])
        with torch.cuda.device(self._pool.device):
            if key not in self._captured:
                self._captured[key] = self._capture(batch)
            step = self._captured[key]
            step.graph.replay()
        return step.logits[: batch.logit_rows.shape[0]]

    def _capture(self, batch: StepBatch) -> _Captured:
        count, blocks = batch.block_tables.shape
        device = self._pool.device
        bounded = replace(
            batch,
            starts=(blocks * self._pool.layout.block_tokens - 1,) * count,
            keep_from=(0,) * count,
            mask_replay=False,
            logit_rows=torch.arange(count, device=device),
        )
        # Warm-ups run on zeros: they write to the reserved row and slot only.
        still = replace(
            bounded,
            token_ids=torch.zeros_like(batch.token_ids),
            positions=torch.zeros_like(batch.positions),
            block_tables=torch.zeros_like(batch.block_tables),
            slots=torch.zeros_like(batch.slots),
        )
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._model.forward(still, self._pool)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: the transfer thread may allocate and synchronise meanwhile.
        mode = "thread_local"
        with no_collection(), torch.cuda.graph(graph, pool=self._memory, capture_error_mode=mode):
            logits = self._model.forward(bounded, self._pool)
        return _Captured(graph, bounded, logits)
