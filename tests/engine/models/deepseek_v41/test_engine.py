"""The model inside the engine: scheduler, prefix reuse, snapshots, preemption and replay (L5, spec §18)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.golden_harness.serving import admit, prefill, run_step
from headrace.engine.loading import ModelError
from headrace.engine.models.deepseek_v41.model import DeepseekV41
from headrace.engine.offline import Completion, OfflineEngine
from headrace.engine.replay import default_keep_tokens
from headrace.engine.request import EngineRequest, ImageInput, RequestKey
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.settings import EngineSettings
from headrace.kvcache.pool import KVPool

LENGTH = 6
SYSTEM = tuple((7 * i + 3) % 83 for i in range(37))
PROMPTS = [SYSTEM + tuple((11 * i + j) % 83 for i in range(j)) for j in (1, 12, 25)] + [(5,)]


def request(number: int, ids: tuple[int, ...], images: tuple[ImageInput, ...] = ()) -> EngineRequest:
    return EngineRequest(
        key=RequestKey(f"r{number}", 1),
        prompt_ids=ids,
        key_root=bytes(32),
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        max_tokens=LENGTH,
        ignore_eos=True,
        images=images,
    )


def greedy(model: DeepseekV41, ids: tuple[int, ...], keep: int | None) -> list[int]:
    """The same request alone: one prefill in one piece, single steps."""
    pool = KVPool(model.layout, num_rows=1 + model.layout.blocks_for(len(ids) + LENGTH), num_slots=2)
    keep_from = 0 if keep is None else len(ids) - keep
    sequence = admit(pool, ids, capacity=len(ids) + LENGTH, keep_from=keep_from)
    logits = prefill(model, pool, sequence, 1000)
    for _ in range(LENGTH - 1):
        sequence.ids.append(int(logits[-1].argmax()))
        logits = run_step(model, pool, [(sequence, 1)])
    return [*sequence.ids[len(ids) :], int(logits[-1].argmax())]


def serve(model: DeepseekV41, settings: EngineSettings, *, rows: int) -> tuple[list[Completion], OfflineEngine]:
    pool = KVPool(model.layout, num_rows=rows, num_slots=5, num_snapshots=12)
    engine = OfflineEngine(model, settings, pool=pool)
    first = engine.generate([request(i, ids) for i, ids in enumerate(PROMPTS)])
    again = engine.generate([request(i + 100, ids) for i, ids in enumerate(PROMPTS)])
    assert engine.engine.integrity(idle=True) == ()
    return first + again, engine


@pytest.mark.parametrize(
    ("replay", "rows"), [("compact", 60), ("compact", 13), ("off", 60)], ids=["room", "preempting", "off"]
)
def test_engine_gives_what_the_model_gives_alone(model_of: Callable[..., DeepseekV41], replay: str, rows: int) -> None:
    """L5: batched, chunked, from cached prefixes, preempted and resumed: the same greedy tokens."""
    model = model_of()
    settings = EngineSettings(max_sequences=4, max_batched_tokens=13, replay=replay)  # type: ignore[arg-type]
    completions, _ = serve(model, settings, rows=rows)
    keep = None if replay == "off" else default_keep_tokens(model.layout)
    for completion in completions:
        assert completion.choices[0].token_ids == greedy(model, completion.request.prompt_ids, keep)
    if replay != "off" and rows == 60:
        assert sum(c.counts.cached for c in completions[len(PROMPTS) :]) > 0


def test_images_go_through_the_engine(model_of: Callable[..., DeepseekV41]) -> None:
    """An image span that chunks cut gives the tokens of one piece; another picture gives others."""
    model = model_of()
    image_id = model.image_token_id
    assert image_id is not None
    ids = SYSTEM[:10] + (image_id,) * 17 + SYSTEM[10:20]
    answers = []
    for seed, chunk in ((1, 100), (1, 5), (2, 5)):
        rows = torch.randn(17, model.hidden_size, generator=torch.Generator().manual_seed(seed))
        image = ImageInput(start=10, length=17, digest=bytes([seed]) * 32, embeddings=rows)
        pool = KVPool(model.layout, num_rows=20, num_slots=5, num_snapshots=4)
        settings = EngineSettings(max_sequences=4, max_batched_tokens=chunk)
        completion = OfflineEngine(model, settings, pool=pool).generate([request(0, ids, (image,))])[0]
        assert completion.choices[0].error is None
        answers.append(completion.choices[0].token_ids)
    assert answers[0] == answers[1] != answers[2]


def test_layers_that_replay_would_skip_refuse_compact_replay(model_of: Callable[..., DeepseekV41]) -> None:
    """Refused when the engine is made, not at the first long prompt."""
    model = model_of()
    model.supports_replay = False
    pool = KVPool(model.layout, num_rows=20, num_slots=5, num_snapshots=4)
    with pytest.raises(ModelError, match=r"engine\.replay"):
        OfflineEngine(model, EngineSettings(replay="compact"), pool=pool)
    for replay in ("mask", "off"):
        OfflineEngine(model, EngineSettings(replay=replay), pool=pool)  # type: ignore[arg-type]
