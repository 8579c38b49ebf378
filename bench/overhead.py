"""What disaggregation costs: a cluster on two cores, prefill pinned to one and decode to the other, beside one process.

    python -m bench.overhead --json

SmolLM2 in bf16, distinct prompts of 540 tokens (nothing is cached; `cached_tokens` shows it), greedy answers of 64
tokens that ignore EOS. Measured in turn, `--rounds` times, so that a busy machine slows every part alike:

- `offline`: `headrace offline`'s engine with two torch threads, 1 and 8 requests at a time;
- `cluster`: router, one prefill, one decode through the front door, 1 and 8 requests in flight;
- `prefill`: the same with max_tokens 1 and 8 in flight, so that decode only takes over and answers;
- `decode`: 8 requests handed over while they have no credit, then run together while prefill is idle.

How a steady window is cut out of a closed loop stands in overhead_harness/load.py. A part's figure is its best round
(the least disturbed one); every round is in `rounds`.

    pipeline_efficiency_c8 = cluster tokens/s ÷ min(64 × prefill requests/s, decode tokens/s)
    ratio_to_offline_c8    = cluster tokens/s ÷ offline tokens/s, both with 8

The router and this program, which is the client, run beside decode (`--client-core`): prefill is what bounds the
pipeline here. `cpu` tells how busy each process was, as shares of a core, by its busiest thread (in a worker the
engine's) and all others (gRPC, asyncio, transfer). `times` are means of what the requests' own reports say.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from bench._progress import Phases
from bench._report import JsonValue, Report, Scalar, arguments, emit, positive
from bench.overhead_harness.cpu import CpuTimes
from bench.overhead_harness.handed_over import HandedOver, measure_handed_over
from bench.overhead_harness.load import Figures, Trace, cluster_load, figures
from bench.overhead_harness.offline_load import TimedModel, offline_load
from bench.parity_harness.texts import logbook
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.engine.converters.smollm2 import fetch_smollm2
from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.offline import OfflineEngine
from headrace.engine.settings import EngineSettings
from headrace.engine.text.tokenizer import Tokenizer

IDLE_S = 3.0
VLLM_TOKENS_PER_S = {"one_process": 175, "disaggregated": 56}
"""vLLM's CPU build with the original SmolLM2 on this kind of machine, measured before this project (orientation)."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a run."""

    prompt_tokens: int = 540
    answer_tokens: int = 64
    concurrency: int = 8
    requests_c1: int = 3
    requests_c8: int = 24
    requests_prefill: int = 18


@dataclass
class Round:
    """Figures of one turn through all parts."""

    offline_c1: Figures
    offline_c8: Figures
    cluster_c1: Figures
    cluster_c8: Figures
    prefill: Figures
    decode: HandedOver
    cpu: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    prefill_cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU of the whole prefill process per request, by part; what others do to the machine hardly shows in it."""

    def bound(self, answer_tokens: int) -> float:
        """Tokens per second that the slower stage alone would allow."""
        return min(answer_tokens * self.prefill.requests_per_s, self.decode.tokens_per_s)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, help="V3 model folder (default: SmolLM2 in bf16, fetched if need be)")
    parser.add_argument("--rounds", type=positive, default=2, help="turns through all parts")
    parser.add_argument("--prefill-core", type=int, default=0)
    parser.add_argument("--decode-core", type=int, default=1)
    parser.add_argument("--client-core", type=int, default=1, help="of the router and of this program as the client")
    options = parser.parse_args(argv)
    folder: Path | None = options.model or fetch_smollm2(dtypes=("bfloat16",)).bfloat16
    assert folder is not None
    pins = {
        "prefill": frozenset({options.prefill_core}),
        "decode": frozenset({options.decode_core}),
        "router": frozenset({options.client_core}),
    }
    emit(measure(folder, Shape(), options.rounds, pins), as_json=options.json)


def measure(
    folder: Path,
    shape: Shape,
    rounds: int,
    pins: Mapping[str, frozenset[int]],
    *,
    threads: int = 2,
    sets: Sequence[str] = ("decode.landing_bytes=512MiB",),
    load: ModelSettings | None = None,
) -> Report:
    """All rounds. `pins`: cores by role; the router's are the client's too. `threads`: of the offline engine. `sets`
    and `load`: settings of the cluster and of the offline engine."""
    prompts = prompt_source(Tokenizer.from_folder(folder), shape.prompt_tokens)
    model = TimedModel(load_model(folder, load))
    settings = EngineSettings(threads=threads, max_sequences=max(shape.concurrency, 2))
    offline = OfflineEngine(model, settings)
    spec = ClusterSpec(folder, {"prefill": 1, "decode": 1}, pins=pins, sets=tuple(sets))
    found: list[Round] = []
    with Phases() as progress, LocalCluster(spec) as cluster:
        bench = _Bench(shape, prompts, progress, offline, cluster, pins["router"])
        bench.warm_up()
        found = [bench.round(index) for index in range(rounds)]
        idle = bench.idle_cpu()
    return make_report(folder, shape, found, model, idle)


class _Bench:
    """The parts of a round around one engine and one cluster."""

    def __init__(
        self,
        shape: Shape,
        prompts: Iterator[tuple[int, ...]],
        progress: Phases,
        offline: OfflineEngine,
        cluster: LocalCluster,
        client_cores: frozenset[int],
    ) -> None:
        self._shape = shape
        self._prompts = prompts
        self._progress = progress
        self._offline = offline
        self._cluster = cluster
        self._client_cores = client_cores
        self._pids = {child.name: child.pid for child in cluster.children} | {"client": os.getpid()}

    def _take(self, count: int) -> list[tuple[int, ...]]:
        return [next(self._prompts) for _ in range(count)]

    def warm_up(self) -> None:
        """Connections, first touches of memory, lazy imports: two requests each way, not counted."""
        offline_load(self._offline, self._take(2), 2, 4, lambda: None, "warm")
        cluster_load(self._cluster.client, self._take(2), 2, 4, lambda: None)

    def round(self, index: int) -> Round:
        shape = self._shape
        cpu: dict[str, dict[str, dict[str, float]]] = {}
        times: dict[str, dict[str, float]] = {}
        prefill_cpu: dict[str, float] = {}

        def offline(concurrency: int, requests: int) -> Figures:
            with self._progress.phase(f"round {index}: offline, {concurrency}", requests) as step:
                name = f"{index}.{concurrency}"
                prompts = self._take(requests)
                traces = offline_load(self._offline, prompts, concurrency, shape.answer_tokens, step, name)
            return figures(traces, concurrency)

        def cluster(label: str, concurrency: int, requests: int, max_tokens: int, fill: int | None = None) -> Figures:
            with (
                self._progress.phase(f"round {index}: {label}, {concurrency}", requests) as step,
                on_cores(self._client_cores),
            ):
                before, start = CpuTimes.now(self._pids), perf_counter()
                client = self._cluster.client
                traces = cluster_load(client, self._take(requests), concurrency, max_tokens, step)
                seconds = perf_counter() - start
                shares = CpuTimes.now(self._pids).since(before, seconds)
            cpu[f"{label}_c{concurrency}"] = shares
            prefill_cpu[f"{label}_c{concurrency}"] = shares["prefill-0"]["all"] * seconds / requests
            times[f"{label}_c{concurrency}"] = mean_times(traces)
            return figures(traces, concurrency, fill=fill)

        return Round(
            offline_c1=offline(1, shape.requests_c1),
            cluster_c1=cluster("cluster", 1, shape.requests_c1, shape.answer_tokens),
            offline_c8=offline(shape.concurrency, shape.requests_c8),
            cluster_c8=cluster("cluster", shape.concurrency, shape.requests_c8, shape.answer_tokens),
            prefill=cluster("prefill", shape.concurrency, shape.requests_prefill, 1, fill=1),
            decode=self._decode(index),
            cpu=cpu,
            times=times,
            prefill_cpu_s=prefill_cpu,
        )

    def _decode(self, index: int) -> HandedOver:
        shape = self._shape
        with self._progress.phase(f"round {index}: decode alone, {shape.concurrency}"), on_cores(self._client_cores):
            addresses = (self._cluster.child(name).address for name in ("prefill-0", "decode-0"))
            prefill, decode = (address or "" for address in addresses)
            (model,) = self._cluster.client.models().models
            prompts, pid = self._take(shape.concurrency), self._pids["decode-0"]
            return measure_handed_over(prefill, decode, pid, model, prompts, shape.answer_tokens)

    def idle_cpu(self) -> dict[str, dict[str, float]]:
        """What the processes use when nobody asks anything: three seconds."""
        before, start = CpuTimes.now(self._pids), perf_counter()
        time.sleep(IDLE_S)
        return CpuTimes.now(self._pids).since(before, perf_counter() - start)


def prompt_source(tokenizer: Tokenizer, length: int) -> Iterator[tuple[int, ...]]:
    """Prompts of exactly `length` tokens that differ from the first line on, without end."""
    seed = 1
    while True:
        ids = tokenizer.encode_trusted(logbook(1 + length // 20, seed=seed))
        if len(ids) < length:
            raise ValueError(f"the text of seed {seed} has {len(ids)} tokens, {length} are needed")
        yield tuple(ids[:length])
        seed += 1


@contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """All threads of this process, and those they start, on these cores for the block; no cores: where they are."""
    before = os.sched_getaffinity(0)
    move_threads(cores or before)
    try:
        yield
    finally:
        move_threads(before)


def move_threads(cores: set[int] | frozenset[int]) -> None:
    """Every thread of this process: gRPC's own are not the caller's children."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(task.name), cores)


def mean_times(traces: Sequence[Trace]) -> dict[str, float]:
    """Milliseconds by part, mean over requests."""
    parts = ("prepare", "queue", "reserve", "prefill_queue", "prefill", "transfer", "first_token", "total")
    reports = [trace.report.times for trace in traces if trace.report is not None]
    return {
        f"{part}_ms": round(sum(getattr(times, f"{part}_us") for times in reports) / len(reports) / 1e3, 2)
        for part in parts
    }


def make_report(
    folder: Path, shape: Shape, rounds: Sequence[Round], model: TimedModel, idle: dict[str, dict[str, float]]
) -> Report:
    """Best round of each part, and the ratios of these."""
    best_offline = max(one.offline_c8.tokens_per_s for one in rounds)
    best_cluster = max(one.cluster_c8.tokens_per_s for one in rounds)
    prefill = max(one.prefill.requests_per_s for one in rounds)
    decode = max(one.decode.tokens_per_s for one in rounds)
    bound = min(shape.answer_tokens * prefill, decode)
    best = max(rounds, key=lambda one: one.cluster_c8.tokens_per_s)
    steps = model.decode_steps.get(shape.concurrency, [])
    results: dict[str, JsonValue] = {
        "model": folder.name,
        "pipeline_efficiency_c8": round(best_cluster / bound, 3),
        "tokens_per_s_c8": round(best_cluster, 1),
        "ratio_to_offline_c8": round(best_cluster / best_offline, 3),
        "offline_tokens_per_s_c8": round(best_offline, 1),
        "tokens_per_s_c1": round(max(one.cluster_c1.tokens_per_s for one in rounds), 1),
        "offline_tokens_per_s_c1": round(max(one.offline_c1.tokens_per_s for one in rounds), 1),
        "prefill_requests_per_s": round(prefill, 3),
        "prefill_bound_tokens_per_s": round(shape.answer_tokens * prefill, 1),
        "decode_tokens_per_s": round(decode, 1),
        "decode_step_ms": round(min(one.decode.step_ms for one in rounds), 2),
        "prefill_cpu_s_per_request": {
            label: round(min(one.prefill_cpu_s[label] for one in rounds), 3) for label in best.prefill_cpu_s
        },
        "pipeline_efficiency_c8_by_round": [
            round(one.cluster_c8.tokens_per_s / one.bound(shape.answer_tokens), 3) for one in rounds
        ],
        "ttft_ms": {
            name: {"p50": round(getattr(best, name).ttft_p50_ms, 1), "p99": round(getattr(best, name).ttft_p99_ms, 1)}
            for name in ("offline_c1", "offline_c8", "cluster_c1", "cluster_c8")
        },
        "forward_ms": {
            "offline_decode_of_8_best": round(min(steps) * 1e3, 2) if steps else None,
            "offline_prefill_steps_best": round(min(model.prefill_s) * 1e3, 2) if model.prefill_s else None,
        },
        "cached_tokens": sum(figure.cached_tokens for one in rounds for figure in _figures(one).values()),
        "cpu": best.cpu | {"idle": idle},  # type: ignore[dict-item]
        "times": best.times,  # type: ignore[dict-item]
        "vllm_tokens_per_s": dict(VLLM_TOKENS_PER_S),
        "load_average": round(os.getloadavg()[0], 2),
        "torch_threads_offline": torch.get_num_threads(),
    }
    table: list[dict[str, Scalar]] = [
        {"round": index, "part": part, **_rounded(asdict(figure))}
        for index, one in enumerate(rounds)
        for part, figure in _figures(one).items()
    ]
    results["decode_rounds"] = [dict(_rounded(asdict(one.decode))) for one in rounds]
    notes = [
        f"prompts of {shape.prompt_tokens} tokens, answers of {shape.answer_tokens}; best of {len(rounds)} rounds",
        "pipeline_efficiency_c8 = tokens_per_s_c8 / min(prefill_bound_tokens_per_s, decode_tokens_per_s)",
    ]
    return Report("overhead", results, table, notes)


def _figures(one: Round) -> dict[str, Figures]:
    return {
        "offline_c1": one.offline_c1,
        "offline_c8": one.offline_c8,
        "cluster_c1": one.cluster_c1,
        "cluster_c8": one.cluster_c8,
        "prefill_c8": one.prefill,
    }


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}


if __name__ == "__main__":
    main()
