"""Output of a model under schemas: whether it is valid, and what the masks cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from headrace.engine.messages import FinishReason
from headrace.engine.offline import Completion, OfflineEngine
from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.text.assets import load_text_assets
from headrace.engine.text.chat import ChatMessage
from headrace.engine.text.constraint_forms import from_schema

FILE = Path(__file__).with_name("schemas.json")


@dataclass(frozen=True)
class Case:
    """A schema of an application and what the model is asked for."""

    name: str
    asked: str
    schema: dict[str, Any]


@dataclass(frozen=True)
class Output:
    """What became of a case."""

    case: Case
    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    fault: str
    """Why it is no instance; empty for instances, and for what was cut off."""


@dataclass(frozen=True)
class Cost:
    """Of all masks of a run, beside the steps that they were made for."""

    masks: int
    mask_us: float
    """Mean, of the thread's own time, tokens taken and mask filled."""
    longest_us: float
    share: float
    """Of the steps' time: what masks would take if nothing hid them."""
    waited_share: float
    """Of the steps' time: what they waited for masks behind the forward pass."""
    steps: int
    step_ms: float
    compile_ms: float
    """Mean, of the wait for a compiled grammar, the start of the compiler left out."""


def load_cases(most: int | None = None) -> list[Case]:
    """The fifty, or the first of them."""
    return [Case(**each) for each in json.loads(FILE.read_text(encoding="utf-8"))][:most]


def generate(
    engine: OfflineEngine, folder: Path, cases: Sequence[Case], max_tokens: int, advance: Callable[[], None]
) -> tuple[list[Output], Cost]:
    """One output of each case, all together in the engine's batches; random, with seeds of their own."""
    engine.compile(from_schema("true"))
    requests, compiling = [], 0.0
    for place, case in enumerate(cases):
        constraint = from_schema(json.dumps(case.schema))
        began = time.perf_counter()
        grammar = engine.compile(constraint)
        compiling += time.perf_counter() - began
        requests.append(
            EngineRequest(
                key=RequestKey(case.name, 1),
                prompt_ids=_prompt(folder, case),
                key_root=bytes(32),
                sampling=SamplingParams(temperature=0.7, top_p=0.95),
                seed=place,
                max_tokens=max_tokens,
                constraint=constraint,
                grammar=grammar,
            )
        )
    seconds = 0.0
    steps = 0

    def stepped(finished: int, tokens: int) -> None:
        nonlocal seconds, steps
        seconds += engine.engine.last_step.seconds
        steps += 1

    completions = engine.generate(requests, stepped, lambda _: advance())
    outputs = [_judged(case, completion) for case, completion in zip(cases, completions, strict=True)]
    work = engine.engine.runner.masks.work
    cost = Cost(
        work.masks,
        1e6 * work.seconds / max(1, work.masks),
        1e6 * work.longest_s,
        work.seconds / seconds,
        work.waited_s / seconds,
        steps,
        1e3 * seconds / max(1, steps),
        1e3 * compiling / max(1, len(cases)),
    )
    return outputs, cost


def _prompt(folder: Path, case: Case) -> tuple[int, ...]:
    assets = load_text_assets(folder, "auto")
    asked = f"{case.asked} Answer as JSON."
    if assets.chat is None:
        return tuple(assets.tokenizer.encode_plain(asked))
    return assets.chat.encode([ChatMessage("user", (asked,))], thinking=False).token_ids


def _judged(case: Case, completion: Completion) -> Output:
    (choice,) = completion.choices
    if choice.error is not None:
        raise choice.error
    assert choice.reason is not None
    fault = ""
    if choice.reason is FinishReason.STOP:
        try:
            value = json.loads(choice.text)
        except ValueError as error:
            fault = f"no JSON: {error}"
        else:
            found = next(iter(Draft202012Validator(case.schema).iter_errors(value)), None)
            fault = "" if found is None else found.message
    return Output(case, choice.text, tuple(choice.token_ids), choice.reason, fault)
