"""The same answer by every way (law L5), from original weights to the cluster: which prompts agree, token for token.

    python -m bench.parity --json

Three ways, all float32: transformers on the original SmolLM2 file; `headrace offline`'s engine in batch_invariant mode;
a cluster of real processes over gRPC. 24 prompts (short ones, shared prefixes, stop strings, block edges, two of 3,000
tokens) are answered greedily by all three, and drawn with a seed (temperature 0.8, top_p 0.95, n = 2) by the last two;
these two each answer everything one at a time and again eight at a time with greedy and drawn requests mixed. A
DeepSeek-V4.1 model with random weights is then compared between the last two, images through an encoder replica
included. Prefix caches stay on, so that later runs reuse what earlier ones left: a hit must not change an answer.

A comparison is one request answered by two ways. It is equal when all choices have the same tokens, the same text and
the same reason of ending. `equal` < `compared` gives exit status 1, and every difference is named with its first
position and the margin between the two likeliest tokens there.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from bench._progress import Phases
from bench._report import JsonValue, Report, Scalar, arguments, emit
from bench.parity_harness.answers import Answer, PairResult, compare
from bench.parity_harness.cases import Case, smollm2_cases, v41_cases
from bench.parity_harness.cluster_way import ClusterWay
from bench.parity_harness.offline_way import EXACT, OfflineWay
from bench.parity_harness.oracle import Oracle, load_smollm2
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.model import make
from headrace.engine.converters.smollm2 import fetch_smollm2
from headrace.engine.folders import models_directory
from headrace.engine.loading import ModelSettings
from headrace.engine.text.assets import load_text_assets

BATCH = 8
OFFLINE_KV_BYTES = 2 << 30
CLUSTER_SETS = (
    "load.dtype=float32",
    "load.batch_invariant=true",
    "decode.landing_bytes=768MiB",
    "admission.capacity_wait_seconds=600",
    "requests.timeout_seconds=900",
)
"""Landing memory for two prompts of 3,000 tokens in float32 (170 MB each) beside short ones; waits that a busy machine
of two cores may need."""


class Way(Protocol):
    """Something that answers requests by name, so many at a time."""

    def answers(
        self, names: Sequence[str], cases: dict[str, Case], batch: int, on_done: Callable[[], None]
    ) -> dict[str, Answer]: ...


@dataclass(frozen=True)
class Suite:
    """One model and its prompts."""

    name: str
    folder: Path
    cases: Sequence[Case]
    replicas: Mapping[str, int]
    oracle: Callable[[], Oracle] | None = None
    sets: tuple[str, ...] = CLUSTER_SETS
    load: ModelSettings = EXACT
    """Of the offline engine; `sets` say the same to the cluster."""


@dataclass
class SuiteResult:
    """Comparisons of one suite."""

    suite: str
    pairs: list[PairResult] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of each way, loading included."""
    cached_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that came out of prefix caches, by run."""
    replica_pairs: dict[str, int] = field(default_factory=dict)
    """Cluster requests by `prefill → decode`."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Choices of the first offline run by reason of ending: stops have to occur to be compared."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--suite", action="append", choices=("smollm2", "v41"), help="only these (default: both)")
    parser.add_argument("--no-transformers", action="store_true", help="leave the original out")
    parser.add_argument("--no-cluster", action="store_true", help="leave the cluster out")
    parser.add_argument("--threads", type=int, default=0, help="torch threads of this process (default: all cores)")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    suites = []
    if "smollm2" in (options.suite or ("smollm2",)):
        suites.append(smollm2_suite())
    if "v41" in (options.suite or ("v41",)):
        suites.append(v41_suite())
    with Phases() as progress:
        results = [
            run_suite(suite, progress, oracle=not options.no_transformers, cluster=not options.no_cluster)
            for suite in suites
        ]
    report = make_report(suites, results)
    emit(report, as_json=options.json)
    sys.exit(0 if report.results["equal"] == report.results["compared"] else 1)


def smollm2_suite() -> Suite:
    """The real model; fetched if it is not there."""
    folder = fetch_smollm2(dtypes=("float32",)).float32
    assert folder is not None
    assets = load_text_assets(folder)
    return Suite(
        "smollm2",
        folder,
        smollm2_cases(assets),
        {"prefill": 2, "decode": 2},
        lambda: load_smollm2(models_directory(), assets.tokenizer),
    )


def v41_suite() -> Suite:
    """Random weights through every mechanism of V4.1, images included."""
    folder = make("deepseek-v41-tiny", None, seed=0)
    cases = v41_cases(load_text_assets(folder))
    return Suite("v41", folder, cases, {"encoder": 1, "prefill": 2, "decode": 2})


def run_suite(suite: Suite, progress: Phases, *, oracle: bool = True, cluster: bool = True) -> SuiteResult:
    """Every way answers; then every pair is compared."""
    result = SuiteResult(suite.name)
    cases = {case.name: case for case in suite.cases}
    greedy, sampled = ([f"{kind}:{name}" for name in cases] for kind in ("greedy", "sampled"))
    mixed = greedy + sampled
    random.Random(5).shuffle(mixed)
    found: dict[str, dict[str, Answer]] = {}

    def ask(way: Way, label: str, names: Sequence[str], batch: int) -> None:
        with timed(result, label), progress.phase(f"{suite.name}: {label}", len(names)) as done:
            found[label] = way.answers(names, cases, batch, done)
        result.cached_tokens[label] = sum(answer.cached_tokens for answer in found[label].values())

    if oracle and suite.oracle is not None:
        with timed(result, "transformers load"), progress.phase(f"{suite.name}: load the original"):
            original = suite.oracle()
        with timed(result, "transformers"), progress.phase(f"{suite.name}: transformers", len(cases)) as done:
            found["transformers"] = original.answers(suite.cases, done)
        del original
    with timed(result, "offline load"), progress.phase(f"{suite.name}: load"):
        offline = OfflineWay(suite.folder, torch.get_num_threads(), OFFLINE_KV_BYTES, suite.load)
    ask(offline, "offline-1", greedy + sampled, 1)
    ask(offline, f"offline-{BATCH}", mixed, BATCH)
    del offline
    if cluster:
        spec = ClusterSpec(suite.folder, suite.replicas, sets=suite.sets)
        with ExitStack() as running:
            with timed(result, "cluster start"), progress.phase(f"{suite.name}: start the cluster"):
                clients = ClusterWay(running.enter_context(LocalCluster(spec)).client)
            ask(clients, "cluster-1", greedy + sampled, 1)
            ask(clients, f"cluster-{BATCH}", mixed, BATCH)
        result.replica_pairs = {f"{prefill} → {decode}": count for (prefill, decode), count in clients.pairs.items()}
    ends = Counter(choice.reason for answer in found["offline-1"].values() for choice in answer.choices)
    result.reasons = dict(sorted(ends.items()))
    for label in found:
        if label == "transformers":
            result.pairs.append(compare(label, "offline-1", found[label], found["offline-1"], greedy))
        elif label != "offline-1":
            result.pairs.append(compare("offline-1", label, found["offline-1"], found[label], greedy + sampled))
    return result


def make_report(suites: Sequence[Suite], results: Sequence[SuiteResult]) -> Report:
    """The object that the issue asks for: `compared`, `equal`, and what they consist of."""
    pairs = [(result.suite, pair) for result in results for pair in result.pairs]
    table: list[dict[str, Scalar]] = [
        {
            "suite": suite,
            "pair": pair.pair,
            "compared": pair.compared,
            "equal": pair.equal,
            "tokens": pair.tokens,
            "with_logprobs": pair.with_logprobs,
            "same_logprobs": pair.same_logprobs,
        }
        for suite, pair in pairs
    ]
    differences: list[JsonValue] = [
        {"suite": suite, **asdict(one)} for suite, pair in pairs for one in pair.differences
    ]
    results_json: dict[str, JsonValue] = {
        "compared": sum(pair.compared for _, pair in pairs),
        "equal": sum(pair.equal for _, pair in pairs),
        "differences": differences,
        "prompts": [
            {"suite": suite.name, "name": case.name, "tokens": len(case.token_ids), "max_tokens": case.max_tokens}
            for suite in suites
            for case in suite.cases
        ],
        "cached_tokens": {result.suite: dict(result.cached_tokens) for result in results},
        "replica_pairs": {result.suite: dict(result.replica_pairs) for result in results},
        "reasons": {result.suite: dict(result.reasons) for result in results},
        "seconds": {result.suite: {k: round(v, 1) for k, v in result.seconds.items()} for result in results},
    }
    notes = [
        f"{one.request} ({one.pair}): choice {one.choice} differs at {one.position}: {one.what}"
        + ("" if one.margin is None else f", margin {one.margin:.2e}")
        for _, pair in pairs
        for one in pair.differences
    ]
    notes.append(
        "same_logprobs: greedy requests whose log-probabilities have the same bits; told, not required of transformers."
    )
    return Report("parity", results_json, table, notes)


@contextmanager
def timed(result: SuiteResult, label: str) -> Iterator[None]:
    """Add the wall time of a block to a result."""
    start = time.monotonic()
    yield
    result.seconds[label] = time.monotonic() - start


if __name__ == "__main__":
    main()
