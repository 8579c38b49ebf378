"""One step: schedule → forward → sample → commit.

Masks of constrained choices are computed by a thread beside the forward pass (masks/step.py). Forward and sampling are
queued on the device without the host reading anything back; the sampled ids, and whether their logits were finite, come
to the host in one copy at the end. On CUDA decode steps replay captured graphs (graphs.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.engine.batch_builder import BatchBuilder
from headrace.engine.errors import EngineError
from headrace.engine.graphs import DecodeGraphs, powers_of_two
from headrace.engine.masks.matcher import Bits, any_but
from headrace.engine.masks.step import MaskMaker, StepMasks
from headrace.engine.memory import SequenceMemory
from headrace.engine.messages import TokenLogprob
from headrace.engine.model import Model
from headrace.engine.sampler import Sampled, sample
from headrace.engine.sampling_batch import RowSampling, build_batch
from headrace.engine.scheduler import Chunk, StepPlan
from headrace.engine.sequence import SampledToken, Sequence
from headrace.engine.settings import EngineSettings
from headrace.kernels.upload import upload
from headrace.kvcache.pool import KVPool


class BadLogits(RuntimeError):
    """The model gave NaN or infinite logits; the sequence ends, since any token from them would be invented."""


@dataclass(frozen=True)
class ChunkResult:
    """Tokens sampled for a chunk's choices, or why there are none."""

    tokens: tuple[SampledToken, ...] = ()
    error: BadLogits | EngineError | None = None


class StepRunner:
    """Model, pool and the buffers between them."""

    def __init__(self, model: Model, pool: KVPool, settings: EngineSettings) -> None:
        self._model = model
        self._pool = pool
        captures = settings.capture_decode and pool.device.type == "cuda"
        self.masks = MaskMaker(model.vocab_size, settings.mask_limit_s)
        self._graphs = DecodeGraphs(model, pool) if captures else None
        buckets, widths = settings.decode_buckets, tuple[int, ...]()
        if captures:
            buckets = buckets or powers_of_two(settings.max_sequences)
            widths = powers_of_two(pool.layout.blocks_for(model.context_tokens + 1))
        self._builder = BatchBuilder(
            model,
            pool,
            max_tokens=max(settings.max_batched_tokens, *buckets, 0),
            max_sequences=max(settings.max_sequences, *buckets, 0),
            buckets=buckets,
            widths=widths,
            mask_replay=settings.replay == "mask",
        )

    def run(self, plan: StepPlan) -> list[ChunkResult]:
        """Forward and sample; one result per chunk, in order."""
        begun = self.masks.begin(plan)
        try:
            logits = self._forward(plan)
        finally:
            # Waited for whatever happens: no thread may read sequences when the engine changes them.
            masks = None if begun is None else self.masks.finish(begun)
        return self._sample(plan, logits, masks)

    @property
    def captured(self) -> int:
        """Graphs of decode steps held."""
        return 0 if self._graphs is None else self._graphs.captured

    def commit(self, chunk: Chunk, memory: SequenceMemory) -> None:
        """The chunk's rows are written: count them by origin, name finished blocks, take a snapshot if one is due."""
        sequence = chunk.sequence
        sequence.computed = chunk.end
        sequence.live.count_computed(sequence, chunk.start, chunk.end)
        memory.commit(sequence)

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        batch = self._builder.build(plan)
        if self._graphs is not None and self._graphs.serves(batch) and all(chunk.choices for chunk in plan.chunks):
            return self._graphs.forward(batch)
        return self._model.forward(batch, self._pool)

    def _sample(self, plan: StepPlan, logits: torch.Tensor, masks: StepMasks | None) -> list[ChunkResult]:
        sampling = [chunk for chunk in plan.chunks if chunk.choices]
        rows = [
            self._row(chunk, choice, None if masks is None else masks.of(index))
            for index, chunk in enumerate(plan.chunks)
            for choice in chunk.choices
        ]
        if not rows:
            return [ChunkResult()] * len(plan.chunks)
        if len(rows) != len(sampling):
            repeats = [index for index, chunk in enumerate(sampling) for _ in chunk.choices]
            logits = logits.index_select(0, upload(repeats, torch.int64, logits.device))
        sampled = sample(logits, build_batch(rows, self._model.vocab_size, logits.device))
        finite = torch.isfinite(logits.sum(dim=-1)).to(torch.int64)
        ids, sound = torch.stack((sampled.token_ids, finite)).tolist()
        logprobs = _logprobs(rows, sampled, ids)
        results: list[ChunkResult] = []
        row = 0
        for place, chunk in enumerate(plan.chunks):
            span = range(row, row + len(chunk.choices))
            row = span.stop
            if masks is not None and place in masks.errors:
                results.append(ChunkResult(error=masks.errors[place]))
            elif all(sound[index] for index in span):
                results.append(ChunkResult(tuple(SampledToken(ids[index], logprobs[index]) for index in span)))
            else:
                results.append(ChunkResult(error=BadLogits("the model gave NaN or infinite logits")))
        return results

    def _row(self, chunk: Chunk, choice: int, mask: Bits | None) -> RowSampling:
        """How the token at position `chunk.end` of a choice is drawn: keyed by its seed and position alone (L5)."""
        sequence = chunk.sequence
        request = sequence.live.request
        params = request.sampling
        output = sequence.output if params.penalises else ()
        suppressed = self._suppressed(sequence)
        if mask is not None and suppressed and not any_but(mask, suppressed):
            suppressed = ()  # the language is at its end, whatever min_tokens says
        return RowSampling(
            params=params,
            seed=sequence.seed if choice == sequence.choice else sequence.live.seed_of(choice),
            position=chunk.end,
            prompt_ids=request.prompt_ids if params.penalises else (),
            output_ids=output,
            suppressed_ids=suppressed,
            mask=mask,
        )

    def _suppressed(self, sequence: Sequence) -> tuple[int, ...]:
        """EOS and stop ids while the choice has fewer than min_tokens."""
        request = sequence.live.request
        if len(sequence.output) >= request.min_tokens:
            return ()
        eos = () if request.ignore_eos else self._model.eos_token_ids
        return (*eos, *request.stop_token_ids)


def _logprobs(rows: list[RowSampling], sampled: Sampled, ids: list[int]) -> list[TokenLogprob | None]:
    """Per sampled row what its request asked for, on the host."""
    result: list[TokenLogprob | None] = [None] * len(rows)
    if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
        return result
    asking = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    chosen, tops, values = sampled.logprobs.tolist(), sampled.top_ids.tolist(), sampled.top_logprobs.tolist()
    for place, index in enumerate(asking):
        count = rows[index].params.logprobs or 0
        top = tuple(zip(tops[place][:count], values[place][:count], strict=True))
        result[index] = TokenLogprob(ids[index], chosen[place], top)
    return result
