"""`headrace generate`: one request to a running cluster, its answer as it comes."""

from __future__ import annotations

import json
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from headrace.cli.ask import Answer, Choice, Message, chat_prompt, text_prompt
from headrace.cli.client import RouterClient
from headrace.cli.client_tls import client_tls
from headrace.cli.cluster_spec import parse_choice
from headrace.cli.exits import CliError, Exit
from headrace.cli.failures import cli_error, told
from headrace.cli.ranges import MOST_TIMEOUT_S, require_within
from headrace.cli.tables import as_json, report_table
from headrace.services.runtime.errors import from_proto
from headrace.v1 import common_pb2, inference_pb2


@dataclass(frozen=True)
class GenerateOptions:
    """The command's flags; None leaves a field to the server's default."""

    prompt: str | None
    system: str | None = None
    chat: bool = False
    images: tuple[Path, ...] = ()
    thinking: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    traffic_class: str | None = None
    """agent, chat or batch."""
    priority: int = 0
    snapshot_at: tuple[int, ...] = ()
    """Positions in tokens."""
    timeout_s: float | None = None
    report: bool = False
    as_json: bool = False


def build_request(options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """The request of some flags. Raises CliError for files and numbers that make none."""
    if options.timeout_s is not None:
        require_within("--timeout", options.timeout_s, 0.001, MOST_TIMEOUT_S)
    prompt = _prompt_text(options.prompt)
    images = tuple(_read(path) for path in options.images)
    if options.chat or options.system is not None or images:
        messages = [] if options.system is None else [Message("system", options.system)]
        wire = chat_prompt([*messages, Message("user", prompt, images)], thinking=options.thinking)
    elif options.thinking is not None:
        raise CliError("--thinking is for chats; add --chat")
    else:
        wire = text_prompt(prompt)
    try:
        return inference_pb2.GenerateRequest(
            prompt=wire,
            sampling=common_pb2.SamplingParams(
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                min_p=options.min_p,
                presence_penalty=options.presence_penalty,
                frequency_penalty=options.frequency_penalty,
                repetition_penalty=options.repetition_penalty,
                seed=options.seed,
                n=options.n,
                logprobs=options.logprobs,
            ),
            stop=common_pb2.StopParams(max_tokens=options.max_tokens, stop=options.stop, ignore_eos=options.ignore_eos),
            traffic_class=_traffic_class(options.traffic_class),
            priority=options.priority,
            snapshot_at=options.snapshot_at,
            timeout_ms=None if options.timeout_s is None else round(options.timeout_s * 1000),
            report=options.report,
        )
    except ValueError as error:
        raise CliError(f"a number is out of its field's range: {error}") from error


def _traffic_class(name: str | None) -> common_pb2.TrafficClass.ValueType:
    """Not set leaves it to the tenant's own. Raises CliError."""
    if name is None:
        return common_pb2.TRAFFIC_CLASS_UNSPECIFIED
    chosen = parse_choice("--traffic-class", name, ("agent", "chat", "batch"))
    return common_pb2.TrafficClass.Value(f"TRAFFIC_CLASS_{chosen.upper()}")


def _prompt_text(given: str | None) -> str:
    """The argument; standard input for `-`, or where there is no argument and input is piped."""
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise CliError("give a PROMPT, or pipe one in")
    return sys.stdin.read()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CliError(f"--image {path}: {error.strerror}") from error


def generate(router: str, options: GenerateOptions, api_key: str | None = None) -> int:
    """Run one request; the exit status."""
    request = build_request(options)
    with told(router), RouterClient(router, api_key=api_key, tls=client_tls(router)) as client:
        events = client.generate(request, options.timeout_s)
        if options.as_json:
            answer = Answer()
            for event in events:
                answer.take(event)
            print(json.dumps(document(answer), ensure_ascii=False))
        elif (options.n or 1) > 1:
            answer = _show_many(events, options.n or 1)
        else:
            answer = _show_one(events)
    if options.report and not options.as_json:
        Console(stderr=True).print(report_table(answer))
    return _verdict(answer)


def _show_one(events: Any) -> Answer:
    """Text on standard output as it comes, and nothing else there."""
    answer = Answer()
    for event in events:
        answer.take(event)
        if event.WhichOneof("event") == "tokens":
            sys.stdout.write(printable(event.tokens.text) if sys.stdout.isatty() else event.tokens.text)
            sys.stdout.flush()
    if not answer.text.endswith("\n"):
        sys.stdout.write("\n")
    if answer.choice(0).reason not in ("stop", "error"):
        Console(stderr=True, style="dim").print(f"(ended: {answer.choice(0).reason})", highlight=False)
    return answer


def printable(text: str) -> str:
    """Text in which control characters cannot steer a terminal; line ends and tabs stay."""
    return "".join(
        character if character in "\n\t" or unicodedata.category(character) != "Cc" else "\ufffd" for character in text
    )


def _show_many(events: Any, n: int) -> Answer:
    """Choices side by side while they grow; on a pipe, one after the other at the end."""
    console = Console()
    answer = Answer()

    def panels() -> Group:
        return Group(*(_panel(index, answer.choice(index)) for index in range(n)))

    if console.is_terminal:
        with Live(console=console, refresh_per_second=10) as live:
            for event in events:
                answer.take(event)
                live.update(panels())
        return answer
    for event in events:
        answer.take(event)
    for index in range(n):
        print(f"--- choice {index} ({answer.choice(index).reason})\n{answer.choice(index).text}")
    return answer


def _panel(index: int, choice: Choice) -> Panel:
    title = f"choice {index}" + (f" · {choice.reason}" if choice.reason else "")
    return Panel(Text(printable(choice.text)), title=title, title_align="left")


def _verdict(answer: Answer) -> int:
    """DONE, or the worst end of a choice."""
    for choice in answer.choices.values():
        if choice.finished is not None and choice.reason == "error":
            raise cli_error(from_proto(choice.finished.error))
    reasons = {choice.reason for choice in answer.choices.values()}
    if "deadline" in reasons:
        raise CliError("the deadline passed; what came is above", Exit.DEADLINE)
    if "cancelled" in reasons:
        raise CliError("the request was cancelled", Exit.INTERRUPTED)
    if "" in reasons or not answer.choices:
        raise CliError("the stream ended before the answer did; this is a defect of the server", Exit.FAILED)
    return Exit.DONE


def document(answer: Answer) -> dict[str, Any]:
    """The object of --json."""
    started = answer.started
    return {
        "request_id": started.request_id if started else None,
        "model": started.model.name if started else None,
        "seed": started.seed if started else None,
        "choices": [
            {
                "index": index,
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.reason,
                "stop": choice.stop,
                "error": as_json(choice.finished.error) if choice.finished and choice.reason == "error" else None,
                "logprobs": [as_json(one) for one in choice.logprobs] or None,
            }
            for index, choice in sorted(answer.choices.items())
        ],
        "usage": as_json(answer.usage) if answer.usage else None,
        "report": as_json(answer.report) if answer.report else None,
        "first_token_s": answer.first_token_s,
        "total_s": answer.total_s,
        "tokens_per_s": answer.tokens_per_s,
    }
