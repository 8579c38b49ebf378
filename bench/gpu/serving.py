"""A whole engine on a device beside the same requests on the CPU: batched, chunked, preempted, resumed, with prefix
hits, decode steps eager and captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu.compare import TokenCheck, compare_tokens
from bench.gpu.tiny import mixed_requests
from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.model import Model
from headrace.engine.offline import Completion, OfflineEngine
from headrace.engine.request import EngineRequest
from headrace.engine.settings import EngineSettings
from headrace.kvcache.pool import KVPool


@dataclass
class EngineRun:
    """One way of serving the requests, and what it showed."""

    way: str
    tokens: TokenCheck
    steps: int = 0
    captured: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    problems: list[str] = field(default_factory=list)
    """Broken invariants at idle (L11), or a mechanism that was to run and did not."""

    @property
    def ok(self) -> bool:
        return self.tokens.ok and not self.problems


def check_engine(folder: Path, device: str, *, longest: int, tokens: int, block: int = 16) -> list[EngineRun]:
    """All ways on ``device`` against one run on the CPU."""
    requests = mixed_requests(longest, tokens)
    expected, _ = serve(
        _load(folder, "cpu", block), "cpu", requests, EngineSettings(prefix_reuse=False, max_sequences=4)
    )
    model = _load(folder, device, block)
    few_rows = model.layout.blocks_for(longest + 21 + tokens) + 1
    ways: dict[str, tuple[EngineSettings, int | None]] = {
        "batched": (EngineSettings(max_batched_tokens=4096), None),
        "eager": (EngineSettings(max_batched_tokens=4096, capture_decode=False), None),
        "chunked": (EngineSettings(max_sequences=8, max_batched_tokens=67), None),
        "preempted, spilled": (EngineSettings(max_sequences=8, max_batched_tokens=512), few_rows),
        "preempted, recomputed": (EngineSettings(max_sequences=8, max_batched_tokens=512, spill_bytes=0), few_rows),
    }
    return [_run(way, model, device, requests, expected, *options) for way, options in ways.items()]


def _load(folder: Path, device: str, block: int) -> Model:
    return load_model(folder, ModelSettings(device=device, dtype="auto", block_tokens=block))


def _run(
    way: str,
    model: Model,
    device: str,
    requests: Sequence[EngineRequest],
    expected: Sequence[Completion],
    settings: EngineSettings,
    rows: int | None,
) -> EngineRun:
    got, engine = serve(model, device, requests, settings, rows=rows)
    core = engine.engine
    run = EngineRun(
        way,
        compare_tokens(expected, got),
        steps=core.status().steps,
        captured=core.runner.captured,
        cached_tokens=sum(completion.counts.cached for completion in got),
        preemptions=core.scheduler.preemptions,
        problems=list(core.integrity(idle=True)),
    )
    if rows is not None and not run.preemptions:
        run.problems.append(f"{rows} rows were to preempt somebody")
    if way == "chunked" and not run.cached_tokens:
        run.problems.append("no prefix was hit")
    if device.startswith("cuda") and settings.capture_decode and not run.captured:
        run.problems.append("no decode step was captured")
    return run


def serve(
    model: Model,
    device: str,
    requests: Sequence[EngineRequest],
    settings: EngineSettings,
    *,
    rows: int | None = None,
) -> tuple[list[Completion], OfflineEngine]:
    """The requests on an engine of their own with ``rows`` usable rows (None: enough for all at once)."""
    if rows is None:
        longest = max(request.prompt_length + request.max_tokens for request in requests)
        rows = (len(requests) + 2) * (model.layout.blocks_for(longest) + 1)
    pool = KVPool(
        model.layout, num_rows=rows + 1, num_slots=settings.max_sequences + 1, num_snapshots=16, device=device
    )
    engine = OfflineEngine(model, settings, pool=pool)
    return engine.generate(requests), engine
