"""`headrace replay`: a trace's requests, at its times, to a running cluster."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from headrace.cli.ask import Answer, token_prompt
from headrace.cli.client import RouterClient
from headrace.cli.client_tls import client_tls
from headrace.cli.exits import CliError, Exit
from headrace.cli.failures import told
from headrace.cli.progress import progress_bar
from headrace.cli.ranges import MOST_TIMEOUT_S, require_within
from headrace.cli.replay_prompts import Prompts, Scale
from headrace.router.simulate.measure import percentiles
from headrace.router.simulate.traces import Trace, TraceError, TraceRow, read_trace
from headrace.services.runtime.errors import HeadraceError
from headrace.v1 import common_pb2, inference_pb2

SPEEDS = (1e-6, 1e9)
SCALES = (1e-6, 1e6)
LONGEST_S = 1e9
"""Thirty years."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The command's flags."""

    trace: Path
    speed: float = 1.0
    """Trace seconds per second."""
    scale: float = 1.0
    output_scale: float | None = None
    """None: as `scale`."""
    limit: int | None = None
    concurrency: int = 64
    timeout_s: float = 300.0
    seed: int = 0
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """One request."""

    late_s: float
    """Sent so long after its time, since as many as may were under way."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    """Name of the error code, without prefix; empty for success."""


@dataclass
class Results:
    """All of them, and how long it took."""

    rows: list[Result] = field(default_factory=list)
    seconds: float = 0.0


Send = Callable[[int, TraceRow, float], Result]
"""(number, row, how late it is) → what came of it. Called from several threads."""


def play(
    rows: Sequence[TraceRow],
    speed: float,
    concurrency: int,
    send: Send,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    told: Callable[[], None] = lambda: None,
) -> Results:
    """Send every row at its time ÷ speed. At most `concurrency` are under way; what comes then is late, not lost."""
    results = Results()
    room = threading.BoundedSemaphore(concurrency)
    begin = now()

    def one(number: int, row: TraceRow, due: float) -> Result:
        try:
            return send(number, row, max(0.0, now() - due))
        finally:
            room.release()
            told()

    with ThreadPoolExecutor(concurrency, thread_name_prefix="replay") as pool:
        futures = []
        for number, row in enumerate(rows):
            due = begin + row.at_s / speed
            wait = due - now()
            if wait > 0:
                sleep(wait)
            room.acquire()
            futures.append(pool.submit(one, number, row, due))
        results.rows = [future.result() for future in futures]
    results.seconds = now() - begin
    return results


def replay(router: str, options: ReplayOptions, api_key: str | None = None) -> int:
    """Replay a trace and print what it was like; the exit status: FAILED when every request failed."""
    trace, dropped = _read(options)
    with told(router), RouterClient(router, api_key=api_key, tls=client_tls(router)) as client:
        prompts = _prompts(client, trace, options)

        def send(number: int, row: TraceRow, late: float) -> Result:
            return _send(client, prompts, number, row, late, options)

        with progress_bar() as progress:
            task = progress.add_task("replay", total=len(trace.rows))
            results = play(trace.rows, options.speed, options.concurrency, send, told=lambda: progress.advance(task))
    document = summary(results, dropped, options)
    if options.as_json:
        print(json.dumps(document, allow_nan=False))
    else:
        show(document, Console())
    return Exit.FAILED if results.rows and all(row.error for row in results.rows) else Exit.DONE


def _read(options: ReplayOptions) -> tuple[Trace, int]:
    require_within("--speed", options.speed, *SPEEDS)
    require_within("--scale", options.scale, *SCALES)
    if options.output_scale is not None:
        require_within("--output-scale", options.output_scale, *SCALES)
    require_within("--timeout", options.timeout_s, 0.001, MOST_TIMEOUT_S)
    try:
        trace, dropped = read_trace(options.trace).with_output()
    except OSError as error:
        raise CliError(f"--trace {options.trace}: {error.strerror}") from error
    except TraceError as error:
        raise CliError(f"--trace {error}") from error
    if not trace.rows:
        raise CliError(f"--trace {options.trace}: no row has output")
    trace = Trace(trace.format, list(trace.rows)[: options.limit])
    if trace.rows and trace.rows[-1].at_s / options.speed > LONGEST_S:
        raise CliError(f"--speed {options.speed:g}: the trace would take {trace.rows[-1].at_s / options.speed:g} s")
    return trace, dropped


def _prompts(client: RouterClient, trace: Trace, options: ReplayOptions) -> Prompts:
    models = client.models().models
    if not models:
        raise CliError("the cluster serves no model yet; try again when its workers are ready", Exit.UNREACHABLE)
    model = models[0]
    avoided = set(model.eos_token_ids)
    if model.HasField("image_token_id"):
        avoided.add(model.image_token_id)
    scale = Scale(
        options.scale,
        options.scale if options.output_scale is None else options.output_scale,
        model.limits.context_tokens,
        model.limits.max_tokens,
    )
    try:
        return Prompts(model.vocab_size, avoided, trace.block_tokens, scale, options.seed)
    except ValueError as error:
        raise CliError(f"--scale: {error}") from error


def _send(
    client: RouterClient, prompts: Prompts, number: int, row: TraceRow, late: float, options: ReplayOptions
) -> Result:
    _, output = prompts.lengths(row)
    request = inference_pb2.GenerateRequest(
        prompt=token_prompt(prompts.prompt(number, row)),
        sampling=common_pb2.SamplingParams(temperature=0.0),
        stop=common_pb2.StopParams(max_tokens=output, ignore_eos=True),
    )
    answer = Answer()
    try:
        for event in client.generate(request, options.timeout_s):
            answer.take(event)
    except HeadraceError as error:
        return Result(late, error=_name(error.code))
    finished = answer.choice(0).finished
    if finished is not None and finished.reason == common_pb2.FINISH_REASON_ERROR:
        return Result(late, error=_name(finished.error.code))
    usage, first = answer.usage, answer.first_token_s
    tokens = len(answer.token_ids)
    return Result(
        late,
        ttft_s=first,
        tpot_s=(answer.total_s - first) / (tokens - 1) if first is not None and tokens > 1 else None,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        cached_tokens=usage.cached_tokens if usage else 0,
        loaded_tokens=usage.loaded_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
    )


def _name(code: common_pb2.ErrorCode.ValueType) -> str:
    return common_pb2.ErrorCode.Name(code).removeprefix("ERROR_CODE_").lower()


def summary(results: Results, dropped: int, options: ReplayOptions) -> dict[str, Any]:
    """Plain values, as --json prints them. TTFT counts from when a request was sent; `late_s` says how long after its
    time that was."""
    rows = results.rows
    good = [row for row in rows if not row.error]
    prompt = sum(row.prompt_tokens for row in good)
    ttft = percentiles([row.ttft_s for row in good if row.ttft_s is not None])
    tpot = percentiles([row.tpot_s for row in good if row.tpot_s is not None])
    late = percentiles([row.late_s for row in rows])
    cached, loaded = sum(row.cached_tokens for row in good), sum(row.loaded_tokens for row in good)
    return {
        "command": "replay",
        "requests": len(rows),
        "without_output": dropped,
        "finished": len(good),
        "errors": dict(Counter(row.error for row in rows if row.error)),
        "seconds": round(results.seconds, 3),
        "speed": options.speed,
        "scale": options.scale,
        "ttft_s": {"p50": round(ttft.p50, 4), "p99": round(ttft.p99, 4)},
        "tpot_ms": {"p50": round(tpot.p50 * 1000, 2), "p99": round(tpot.p99 * 1000, 2)},
        "late_s": {"p50": round(late.p50, 4), "p99": round(late.p99, 4)},
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "loaded_tokens": loaded,
        "hit_ratio": round((cached + loaded) / prompt, 4) if prompt else 0.0,
        "completion_tokens": sum(row.completion_tokens for row in good),
    }


def show(document: dict[str, Any], console: Console) -> None:
    """A table for people."""
    table = Table(show_header=False, box=SIMPLE_HEAD, padding=(0, 2, 0, 0))
    errors = ", ".join(f"{count} {name}" for name, count in document["errors"].items()) or "none"
    ttft, tpot, late = document["ttft_s"], document["tpot_ms"], document["late_s"]
    table.add_row("finished", f"{document['finished']:,} of {document['requests']:,} in {document['seconds']:.1f} s")
    table.add_row("errors", errors)
    table.add_row("TTFT p50 / p99", f"{ttft['p50']:.3f} / {ttft['p99']:.3f} s")
    table.add_row("TPOT p50 / p99", f"{tpot['p50']:.1f} / {tpot['p99']:.1f} ms")
    table.add_row("sent late p50 / p99", f"{late['p50']:.3f} / {late['p99']:.3f} s")
    table.add_row(
        "prompt tokens",
        f"{document['prompt_tokens']:,}: {document['cached_tokens']:,} cached, {document['loaded_tokens']:,} loaded "
        f"({document['hit_ratio']:.1%})",
    )
    table.add_row("output tokens", f"{document['completion_tokens']:,}")
    console.print(table)
