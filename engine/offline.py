"""Requests in, completions out, in one process and one thread: `headrace offline` and bench.parity."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from headrace.engine.core import Engine
from headrace.engine.errors import EngineError
from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.masks.grammars import Grammar, Grammars
from headrace.engine.messages import Finished, FinishReason, PromptCounts, Submit, TokenLogprob, Tokens, Usage
from headrace.engine.model import Model
from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.roles import WholeRole
from headrace.engine.settings import EngineSettings
from headrace.engine.sizing import pool_sizes
from headrace.engine.text.constraint import Constraint
from headrace.engine.text.tokenizer import Tokenizer
from headrace.engine.tier_messages import TierSink
from headrace.kvcache.pool import KVPool


@dataclass
class ChoiceResult:
    """One finished choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_match: str | int | None = None
    error: EngineError | None = None


@dataclass
class Completion:
    """One finished request. Seconds are on the engine's clock, from the moment the request was handed to the engine."""

    request: EngineRequest
    choices: list[ChoiceResult]
    counts: PromptCounts = field(default_factory=PromptCounts)
    completion_tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0


Progress = Callable[[int, int], None]
"""Called with (finished requests, generated tokens)."""
OnDone = Callable[[Completion], None]
"""Called once for each request, when its completion is whole."""


class OfflineEngine:
    """A whole engine driven by a plain loop."""

    def __init__(
        self,
        model: Model,
        settings: EngineSettings | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        pool: KVPool | None = None,
        tier: TierSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pool` overrides the sizes that `settings.kv_bytes` gives; `tier` takes what is to outlive it."""
        settings = settings or EngineSettings()
        self.pool = pool or make_pool(model, settings)
        self._grammars = Grammars(tokenizer, model.vocab_size, model.eos_token_ids, settings)
        self.engine = Engine(model, self.pool, settings, WholeRole, clock=clock, tokenizer=tokenizer, tier=tier)
        if settings.threads:
            torch.set_num_threads(settings.threads)

    @classmethod
    def load(
        cls, folder: Path, settings: EngineSettings | None = None, model: ModelSettings | None = None
    ) -> OfflineEngine:
        """From a model folder, loaded as `model` says; without tokenizer.json it serves token ids only."""
        settings = settings or EngineSettings()
        tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
        return cls(load_model(folder, model), settings, tokenizer=tokenizer)

    def generate(
        self, requests: Iterable[EngineRequest], progress: Progress | None = None, on_done: OnDone | None = None
    ) -> list[Completion]:
        """Serve all requests, at most `max_waiting` queued at a time; completions in the order of the requests.

        A request that is refused gets a Completion whose choices carry the error, so one bad line stops no batch (L13).
        """
        todo = list(requests)
        results = {request.key: Completion(request, [ChoiceResult() for _ in range(request.n)]) for request in todo}
        if len(results) != len(todo):
            raise ValueError("two requests have the same id and attempt")
        started: dict[RequestKey, float] = {}
        finished = tokens = 0
        upcoming = iter(todo)
        request = next(upcoming, None)
        with torch.inference_mode():
            while request is not None or len(self.engine.ledger):
                while request is not None and self.engine.scheduler.waiting < self.engine.settings.max_waiting:
                    started[request.key] = self.engine.clock()
                    refused = self._submit(request, results[request.key])
                    finished += refused
                    if refused and on_done is not None:
                        on_done(results[request.key])
                    request = next(upcoming, None)
                progressed = self.engine.step()
                if not progressed and request is None and len(self.engine.ledger):
                    problems = self.engine.integrity() or ("a request waits for credit that nobody gives",)
                    raise RuntimeError(f"offline generation is stuck: {'; '.join(problems)}")
                for event in self.engine.drain_events():
                    completion = results[event.key]
                    self._take(event, completion, self.engine.clock() - started[event.key])
                    finished += isinstance(event, Usage)
                    if on_done is not None and isinstance(event, Usage):
                        on_done(completion)
                    tokens += len(event.token_ids) if isinstance(event, Tokens) else 0
                if progress is not None:
                    progress(finished, tokens)
        return [results[request.key] for request in todo]

    def compile(self, constraint: Constraint) -> Grammar:
        """A constraint compiled for this model, from the cache where it is known. Raises EngineError."""
        return self._grammars.get(constraint)

    def close(self) -> None:
        """End the process that compiles constraints, if one was started."""
        self._grammars.close()

    def _submit(self, request: EngineRequest, completion: Completion) -> int:
        try:
            if request.constraint is not None and request.grammar is None:
                request = replace(request, grammar=self.compile(request.constraint))
            self.engine.apply(Submit(request))
        except EngineError as error:
            for choice in completion.choices:
                choice.reason, choice.error = FinishReason.ERROR, error
            return 1
        return 0

    @staticmethod
    def _take(event: object, completion: Completion, seconds: float) -> None:
        match event:
            case Tokens():
                choice = completion.choices[event.choice]
                choice.token_ids += event.token_ids
                choice.text += event.text
                choice.logprobs += event.logprobs
                if completion.first_token_s is None:
                    completion.first_token_s = seconds
            case Finished():
                choice = completion.choices[event.choice]
                choice.reason, choice.stop_match, choice.error = event.reason, event.stop_match, event.error
            case Usage():
                completion.counts = event.counts
                completion.completion_tokens = event.completion_tokens
                completion.total_s = seconds


def make_pool(model: Model, settings: EngineSettings) -> KVPool:
    """A pool of the model's layout within the settings' budget."""
    sizes = pool_sizes(model.layout, settings, model.context_tokens)
    return KVPool(
        model.layout,
        num_rows=sizes.num_rows,
        num_slots=sizes.num_slots,
        num_snapshots=sizes.num_snapshots,
        device=model.device,
    )


__all__: Sequence[str] = ["ChoiceResult", "Completion", "OfflineEngine", "OnDone", "Progress", "make_pool"]
