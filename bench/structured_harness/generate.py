"""Output of a model under schemas: whether it is valid, and what the masks cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.structured_harness.judge import fault_of
from headrace.engine.messages import FinishReason
from headrace.engine.offline import Completion, OfflineEngine
from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.text.assets import TextAssets, load_text_assets
from headrace.engine.text.chat import ChatMessage
from headrace.engine.text.constraint import Constraint, Language
from headrace.engine.text.json_schema.compile import schema_grammar

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
    """See Asked."""


def load_cases(most: int | None = None) -> list[Case]:
    """The fifty, or the first of them."""
    return [Case(**each) for each in json.loads(FILE.read_text(encoding="utf-8"))][:most]


def constraint_of(case: Case) -> Constraint:
    """The case's language, formats asserted. Raises SchemaRefused."""
    return Constraint(Language.GRAMMAR, schema_grammar(json.dumps(case.schema), formats=True))


@dataclass(frozen=True)
class Asked:
    """Requests that can be generated."""

    requests: tuple[EngineRequest, ...]
    compile_ms: float
    """Mean, of the wait for a compiled grammar, the start of the compiler left out."""


def prepare(
    engine: OfflineEngine, folder: Path, cases: Sequence[Case], max_tokens: int, advance: Callable[[], None]
) -> Asked:
    """One request of each case; random, with seeds of their own."""
    engine.compile(Constraint(Language.GRAMMAR, schema_grammar("true")))
    assets = load_text_assets(folder, "auto")
    requests, compiling = [], 0.0
    for place, case in enumerate(cases):
        constraint = constraint_of(case)
        began = time.perf_counter()
        grammar = engine.compile(constraint)
        compiling += time.perf_counter() - began
        requests.append(
            EngineRequest(
                key=RequestKey(case.name, 1),
                prompt_ids=_prompt(assets, case),
                key_root=bytes(32),
                sampling=SamplingParams(temperature=0.7, top_p=0.95),
                seed=place,
                max_tokens=max_tokens,
                constraint=constraint,
                grammar=grammar,
            )
        )
        advance()
    return Asked(tuple(requests), 1e3 * compiling / max(1, len(cases)))


def generate(
    engine: OfflineEngine, cases: Sequence[Case], asked: Asked, advance: Callable[[], None]
) -> tuple[list[Output], Cost]:
    """One output of each case, as many at once as the engine takes."""
    seconds = 0.0
    steps = 0

    def stepped(finished: int, tokens: int) -> None:
        nonlocal seconds, steps
        seconds += engine.engine.last_step.seconds
        steps += 1

    completions = engine.generate(asked.requests, stepped, lambda _: advance())
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
        asked.compile_ms,
    )
    return outputs, cost


def _prompt(assets: TextAssets, case: Case) -> tuple[int, ...]:
    asked = f"{case.asked} Answer as JSON."
    if assets.chat is None:
        return tuple(assets.tokenizer.encode_plain(asked))
    return assets.chat.encode([ChatMessage("user", (asked,))], thinking=False).token_ids


def _judged(case: Case, completion: Completion) -> Output:
    (choice,) = completion.choices
    if choice.error is not None:
        raise choice.error
    assert choice.reason is not None
    fault = fault_of(choice.text, case.schema) if choice.reason is FinishReason.STOP else ""
    return Output(case, choice.text, tuple(choice.token_ids), choice.reason, fault)
