"""`kill -9` of the decode process in the middle of a seeded stream, side by side with the undisturbed one.

    python examples/failover.py                500 tokens of SmolLM2 (DeepSeek-V3 form) and of a tiny DeepSeek-V4.1
    python examples/failover.py --tokens 120   fewer

The router makes a new attempt at the other decode process from the tokens that the client has: it sees one stream, with
a short pause. Exits with 0 if tokens, text and log-probabilities of both streams are equal, for both models.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.cli.ask import Answer, Choice, Message, chat_prompt, token_prompt
from headrace.cli.client import replica_status
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.exits import CliError
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.model import fetch, make
from headrace.services.runtime.errors import HeadraceError
from headrace.v1 import common_pb2, inference_pb2

console = Console(highlight=False)
EXACT = ("load.dtype=float32", "load.entry_format=float32", "load.batch_invariant=true")
"""Equal tokens by every way are promised in this mode (law L5)."""
TIMEOUT_S = 1200.0
SHOWN = 700
"""Characters of a stream that are shown: those around the kill."""


@dataclass
class Stream:
    """What a client saw."""

    answer: Answer = field(default_factory=Answer)
    arrived: list[float] = field(default_factory=list)
    """Moment of every event with tokens."""
    killed: str = ""
    killed_at: float = 0.0
    before: int = 0
    """Characters that had come when it was killed."""

    @property
    def choice(self) -> Choice:
        return self.answer.choice(0)

    @property
    def pause_s(self) -> float:
        """From the kill to the first event that was not on its way: the longest wait after it."""
        after = [self.killed_at, *(moment for moment in self.arrived if moment >= self.killed_at)]
        return max((later - earlier for earlier, later in itertools.pairwise(after)), default=0.0)

    def drawn(self) -> Text:
        """The text around the kill; what came after it is green."""
        text = self.choice.text
        start = max(0, self.before - SHOWN // 2)
        shown = Text(("…" if start else "") + text[start : self.before])
        shown.append(text[self.before : start + SHOWN], style="green" if self.killed else "")
        return shown.append("…" if len(text) > start + SHOWN else "")


def read(cluster: LocalCluster, request: inference_pb2.GenerateRequest, kill_at: int | None) -> Stream:
    """The whole stream. `kill_at`: tokens after which its decode process dies."""
    stream = Stream()
    for event in cluster.client.generate(request, TIMEOUT_S):
        stream.answer.take(event)
        if event.HasField("tokens"):
            stream.arrived.append(time.monotonic())
        if kill_at is not None and len(stream.choice.token_ids) >= kill_at:
            kill_at = None
            stream.before = len(stream.choice.text)
            child = next(each for each in cluster.children if each.role == "decode" and busy(each.address))
            child.signal(signal.SIGKILL)
            stream.killed, stream.killed_at = child.name, time.monotonic()
    return stream


def busy(address: str | None) -> bool:
    """Whether a process has a live request."""
    return address is not None and bool(replica_status(address).requests.live)


def same(first: Stream, second: Stream) -> bool:
    """Tokens, text, log-probabilities and end."""
    one, two = first.choice, second.choice
    return (one.token_ids, one.text, one.reason) == (two.token_ids, two.text, two.reason) and [
        position.chosen.logprob for position in one.logprobs
    ] == [position.chosen.logprob for position in two.logprobs]


def compare(name: str, folder: Path, prompt: inference_pb2.Prompt, tokens: int, table: Table) -> bool:
    """Both streams of one model, shown; whether they are equal."""
    console.rule(f"{name}: {tokens} tokens, decode killed in the middle")
    request = inference_pb2.GenerateRequest(
        prompt=prompt,
        sampling=common_pb2.SamplingParams(temperature=0.8, top_p=0.95, seed=20261130, logprobs=0),
        stop=common_pb2.StopParams(max_tokens=tokens, ignore_eos=True),
        report=True,
    )
    with LocalCluster(ClusterSpec(folder, {"prefill": 1, "decode": 2}, sets=EXACT)) as cluster:
        calm = read(cluster, request, None)
        disturbed = read(cluster, request, tokens // 2)
    calm.before = disturbed.before
    equal = same(calm, disturbed)
    panels = [
        Panel(calm.drawn(), title="undisturbed", width=console.width // 2 - 1),
        Panel(disturbed.drawn(), title=f"kill -9 {disturbed.killed}", width=console.width // 2 - 1),
    ]
    console.print(Columns(panels, padding=0))
    usage, report = disturbed.answer.usage, disturbed.answer.report
    table.add_row(
        name,
        f"{len(calm.choice.token_ids)} / {len(disturbed.choice.token_ids)}",
        disturbed.killed,
        str(report.attempts if report is not None else "?"),
        str(usage.recomputed_tokens if usage is not None else "?"),
        f"{disturbed.pause_s:.2f} s",
        "[green]equal[/green]" if equal else "[red]they differ[/red]",
    )
    return equal and bool(disturbed.killed)


def run(tokens: int) -> bool:
    """Both models; whether all streams are equal. Raises CliError or HeadraceError."""
    table = Table("model", "tokens", "killed", "attempts", "computed again", "longest pause after it", "streams")
    folders = {folder.name: folder for folder in fetch("smollm2", None, None)}
    chat = chat_prompt([Message("user", "Tell me a long story about a river and the people who live beside it.")])
    equal = compare("SmolLM2 (DeepSeek-V3)", folders["smollm2-float32"], chat, tokens, table)
    ids = [3 + (index * index * 17 + index * 5) % 240 for index in range(60)]
    tiny = make("deepseek-v41-tiny", None, 0)
    equal &= compare("DeepSeek-V4.1-tiny", tiny, token_prompt(ids), tokens, table)
    console.print(table)
    return equal


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 if every disturbed stream equals its undisturbed one."""
    parser = argparse.ArgumentParser(
        description="kill -9 of decode in mid-stream, side by side with the undisturbed run"
    )
    parser.add_argument("--tokens", type=int, default=500, help="length of each stream (500)")
    try:
        return 0 if run(parser.parse_args(arguments).tokens) else 1
    except (CliError, HeadraceError) as failure:
        console.print(f"failed: {failure}", style="bold red", markup=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
