"""The same closed loop around the engine of `headrace offline`, and how long its forward passes take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from bench.overhead_harness.load import Trace
from headrace.engine.batch import StepBatch
from headrace.engine.messages import Submit, Tokens, Usage
from headrace.engine.model import Model
from headrace.engine.offline import OfflineEngine
from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.sampling_params import SamplingParams
from headrace.kvcache.pool import KVPool

GREEDY = SamplingParams(temperature=0.0)


class TimedModel:
    """A model that counts the seconds of its forward passes, decode steps of one size apart."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.layout = model.layout
        self.device = model.device
        self.supports_replay = model.supports_replay
        self.vocab_size = model.vocab_size
        self.hidden_size = model.hidden_size
        self.context_tokens = model.context_tokens
        self.lookback_tokens = model.lookback_tokens
        self.image_token_id = model.image_token_id
        self.eos_token_ids = model.eos_token_ids
        self.decode_steps: dict[int, list[float]] = {}
        """Seconds of steps in which every sequence brings one token, by number of sequences."""
        self.prefill_s: list[float] = []
        """Seconds of all other steps."""

    def forward(self, batch: StepBatch, pool: KVPool) -> torch.Tensor:
        start = perf_counter()
        logits = self._model.forward(batch, pool)
        seconds = perf_counter() - start
        if all(length == 1 for length in batch.lengths):
            self.decode_steps.setdefault(len(batch.lengths), []).append(seconds)
        else:
            self.prefill_s.append(seconds)
        return logits


def offline_load(
    engine: OfflineEngine,
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    max_tokens: int,
    on_done: Callable[[], None],
    name: str,
) -> list[Trace]:
    """Serve every prompt, `concurrency` at a time; a request is sent in the turn after another ends."""
    traces: dict[RequestKey, Trace] = {}
    core = engine.engine
    upcoming = iter(
        EngineRequest(
            key=RequestKey(f"{name}.{index}", 1),
            prompt_ids=tuple(prompt),
            key_root=bytes(32),
            sampling=GREEDY,
            seed=1,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        for index, prompt in enumerate(prompts)
    )
    running = 0
    with torch.inference_mode():
        while True:
            while running < concurrency and (request := next(upcoming, None)) is not None:
                traces[request.key] = Trace(perf_counter())
                core.apply(Submit(request))
                running += 1
            if not running:
                return list(traces.values())
            core.step()
            now = perf_counter()
            for event in core.drain_events():
                trace = traces[event.key]
                if isinstance(event, Tokens):
                    trace.tokens.append((now, len(event.token_ids)))
                elif isinstance(event, Usage):
                    trace.ended, trace.cached_tokens = now, event.counts.cached
                    running -= 1
                    on_done()
