"""A closed loop: so many clients, each sending its next request when its last one has ended; and what it tells.

Throughput is that of the steady window: from the end of the first `concurrency` requests, when every client is past its
first answer and the pipeline is full, to the moment the last request is sent, after which fewer run. (A single stage is
full as soon as its first request has ended, so prefill alone is counted from there: `fill` = 1.) Tokens are counted as
they reach the client inside the window, whichever request they belong to. Times to the first token are those of all
requests but the first `concurrency`, whose prompts arrive together.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter

from headrace.cli.client import RouterClient
from headrace.v1 import common_pb2, inference_pb2

TIMEOUT_S = 300.0


@dataclass
class Trace:
    """One request as its client saw it."""

    sent: float
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """(arrival, number of tokens)."""
    ended: float = 0.0
    cached_tokens: int = 0
    report: inference_pb2.RequestReport | None = None

    @property
    def first_token_s(self) -> float:
        return self.tokens[0][0] - self.sent


@dataclass(frozen=True)
class Figures:
    """What a closed loop showed."""

    concurrency: int
    requests: int
    window_s: float
    tokens_per_s: float
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    per_token_p50_ms: float
    """Median over requests of the mean time between tokens after the first."""
    cached_tokens: int


def figures(traces: Sequence[Trace], concurrency: int, *, fill: int | None = None) -> Figures:
    """Figures of the steady window, which begins when `fill` requests have ended (None: `concurrency`). Raises
    ValueError when there are too few requests for one."""
    fill = concurrency if fill is None else fill
    if len(traces) < concurrency + fill + 1:
        raise ValueError(f"{len(traces)} requests show no steady state of {concurrency}; send more")
    begin = sorted(trace.ended for trace in traces)[fill - 1]
    end = max(trace.sent for trace in traces)
    seconds = end - begin
    tokens = sum(count for trace in traces for at, count in trace.tokens if begin < at <= end)
    finished = sum(begin < trace.ended <= end for trace in traces)
    later = sorted(traces, key=lambda trace: trace.sent)[concurrency:]
    first = sorted(trace.first_token_s for trace in later)
    gaps = [
        (trace.tokens[-1][0] - trace.tokens[0][0]) / (sum(count for _, count in trace.tokens) - 1)
        for trace in later
        if len(trace.tokens) > 1
    ]
    return Figures(
        concurrency=concurrency,
        requests=len(traces),
        window_s=seconds,
        tokens_per_s=tokens / seconds,
        requests_per_s=finished / seconds,
        ttft_p50_ms=statistics.median(first) * 1e3,
        ttft_p99_ms=first[min(len(first) - 1, int(len(first) * 0.99))] * 1e3,
        per_token_p50_ms=statistics.median(gaps) * 1e3 if gaps else 0.0,
        cached_tokens=sum(trace.cached_tokens for trace in traces),
    )


def cluster_load(
    client: RouterClient,
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    max_tokens: int,
    on_done: Callable[[], None],
) -> list[Trace]:
    """Send every prompt through the router, `concurrency` in flight."""

    def one(prompt: Sequence[int]) -> Trace:
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=prompt)),
            sampling=common_pb2.SamplingParams(temperature=0.0, seed=1),
            stop=common_pb2.StopParams(max_tokens=max_tokens, ignore_eos=True),
            report=True,
        )
        trace = Trace(perf_counter())
        for event in client.generate(request, TIMEOUT_S):
            kind = event.WhichOneof("event")
            if kind == "tokens":
                trace.tokens.append((perf_counter(), len(event.tokens.token_ids)))
            elif kind == "finished":
                trace.ended = perf_counter()
                if event.finished.HasField("error"):
                    raise RuntimeError(f"a request failed: {event.finished.error.message}")
            elif kind == "usage":
                trace.cached_tokens = event.usage.cached_tokens
            elif kind == "report":
                trace.report = event.report
        on_done()
        return trace

    with ThreadPoolExecutor(concurrency) as clients:
        return list(clients.map(one, prompts))
