"""The second way: one process, one engine, `headrace offline`'s class."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.parity_harness.answers import GREEDY_LOGPROBS, Answer, ChoiceAnswer
from bench.parity_harness.cases import Case
from headrace.engine.loading import ModelSettings
from headrace.engine.offline import ChoiceResult, Completion, OfflineEngine
from headrace.engine.request import EngineRequest, ImageInput, RequestKey
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.settings import EngineSettings
from headrace.engine.vision.loading import load_vision_tower
from headrace.engine.vision.preprocess import ImageLimits, preprocess
from headrace.engine.vision.tower import VisionTower

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
SAMPLED_CHOICES = 2
GREEDY = SamplingParams(temperature=0.0, logprobs=GREEDY_LOGPROBS)
EXACT = ModelSettings(dtype="float32", batch_invariant=True)


class OfflineWay:
    """A loaded engine. Its prefix cache lives from run to run: a prefix hit must not change an answer (L5)."""

    def __init__(self, folder: Path, threads: int, kv_bytes: int, load: ModelSettings) -> None:
        self._engine = OfflineEngine.load(folder, EngineSettings(threads=threads, kv_bytes=kv_bytes), load)
        self._tower: VisionTower | None = None
        self._folder = folder
        self._runs = 0

    def answers(
        self, names: Sequence[str], cases: dict[str, Case], batch: int, on_done: Callable[[], None]
    ) -> dict[str, Answer]:
        """Answers to the named requests (`greedy:CASE`, `sampled:CASE`), `batch` at a time, in the order given."""
        self._runs += 1
        found: dict[str, Answer] = {}
        done = 0

        def progress(finished: int, _tokens: int) -> None:
            nonlocal done
            for _ in range(finished - done):
                on_done()
            done = finished

        for start in range(0, len(names), batch):
            some = names[start : start + batch]
            done = 0
            requests = [self._request(name, cases[name.partition(":")[2]]) for name in some]
            for name, completion in zip(some, self._engine.generate(requests, progress), strict=True):
                found[name] = answer(completion)
        problems = self._engine.engine.integrity(idle=True)
        if problems:
            raise RuntimeError(f"the offline engine is not sound when idle: {'; '.join(problems)}")
        return found

    def _request(self, name: str, case: Case) -> EngineRequest:
        greedy = name.startswith("greedy:")
        ids, images = self._expanded(case)
        return EngineRequest(
            key=RequestKey(f"{self._runs}/{name}", 1),
            prompt_ids=ids,
            key_root=bytes(32),
            sampling=GREEDY if greedy else SAMPLED,
            seed=case.seed,
            max_tokens=case.max_tokens,
            n=1 if greedy else SAMPLED_CHOICES,
            images=images,
            stop=case.stop,
        )

    def _expanded(self, case: Case) -> tuple[tuple[int, ...], tuple[ImageInput, ...]]:
        """Each placeholder becomes its image's span, as the router and the encoder do it."""
        if not case.images:
            return case.token_ids, ()
        if self._tower is None:
            self._tower = load_vision_tower(self._folder, dtype=torch.float32, device=torch.device("cpu"))
        ids: list[int] = []
        images: list[ImageInput] = []
        placeholder = self._engine.engine.model.image_token_id
        for token in case.token_ids:
            if token != placeholder:
                ids.append(token)
                continue
            data = case.images[len(images)]
            patches, plan = preprocess(data, self._tower.config, ImageLimits())
            with torch.inference_mode():
                rows = self._tower.encode(patches, plan)
            images.append(ImageInput(len(ids), plan.num_tokens, hashlib.sha256(data).digest(), rows))
            ids += [token] * plan.num_tokens
        return tuple(ids), tuple(images)


def answer(completion: Completion) -> Answer:
    """An offline completion as an answer. Raises RuntimeError for one that ended in an error."""
    return Answer(tuple(map(_choice, completion.choices)), completion.counts.cached)


def _choice(choice: ChoiceResult) -> ChoiceAnswer:
    if choice.error is not None or choice.reason is None:
        raise RuntimeError(f"an offline request failed: {choice.error}")
    margins = tuple(one.top[0][1] - one.top[1][1] for one in choice.logprobs if len(one.top) > 1)
    logprobs = tuple(one.logprob for one in choice.logprobs)
    return ChoiceAnswer(tuple(choice.token_ids), choice.text, choice.reason.value, logprobs, margins)
