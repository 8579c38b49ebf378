"""The cache tier on real clusters: prefixes that outlive the request, the process and the crash. Exits non-zero when a
bound fails.

    python examples/cache_tour.py            SmolLM2 (DeepSeek-V3 form) and a tiny DeepSeek-V4.1; minutes on two cores
    python examples/cache_tour.py --quick    shorter prompts and fewer turns

For each model, a chat of three turns and an agent loop (one long system prompt, tool turns) run through two prefill and
two decode processes with a store. m is the length of the token prefix that a turn shares with the prompt and output of
an earlier one; of it, block · ⌊(m − keep)/block⌋ tokens have to be cached or loaded (V4.1: keep is K of bounded replay;
V3: 1, the token that is computed for its logits). Then every process is killed right after an answer; a new cluster
goes on, and must find what was durable. Last, the same turns run with the cache off: the tokens must be the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.cli.ask import Answer, Message, chat_prompt, gather
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.exits import CliError
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.model import fetch, make
from headrace.cli.tables import human_bytes, human_seconds
from headrace.services.runtime.errors import HeadraceError
from headrace.v1 import common_pb2, control_pb2, inference_pb2

console = Console(highlight=False)
EXACT = ("load.dtype=float32", "load.entry_format=float32", "load.batch_invariant=true")
"""Equal tokens by every way are promised in this mode (law L5)."""
EAGER = ("cache.min_load_tokens=0", "cache.break_even=false", "cache.load_deadline_ms=10000")
"""Load every gain, also those that computing would bring as fast: the bounds are about what is found."""
OFF = ("engine.prefix_reuse=false",)
PATIENT = ("registry.ttl_seconds=60", "engine.lease_s=60")
"""Nobody dies here but by our hand; a machine that is busy with something else is no reason to give up on a worker."""
CHAT = ("Where do rivers begin?", "And where do they end?", "Name one river that does not reach a sea.")
AFTER = "Sum up in one sentence what we have so far."
PATIENCE_S = 120.0
CONTEXT = 16384


class TourFailed(Exception):
    """What was promised did not happen."""


@dataclass(frozen=True)
class Family:
    """A model and what of a common prefix it can reuse."""

    name: str
    folder: Path
    keep: int
    """Tokens at the end of a common prefix that are computed in any case."""
    letters_only: bool
    """Random weights: bias the output to letters, so that its text is the same tokens when it comes back as a turn."""


@dataclass(frozen=True)
class Sizes:
    system_tokens: int
    tool_turns: int
    answer_tokens: int
    replicas: dict[str, int]


@dataclass(frozen=True)
class Turn:
    """One answered request."""

    name: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    text: str
    usage: common_pb2.Usage
    answer: Answer

    @property
    def known(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)


@dataclass
class Conversations:
    """The chat and the agent loop, as far as they have come."""

    family: Family
    sizes: Sizes
    chat: list[Message] = field(default_factory=list)
    agent: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def play(self, cluster: LocalCluster) -> Iterator[Turn]:
        """All turns up to the crash."""
        system = Message("system", system_text(cluster, self.sizes.system_tokens))
        self.chat, self.agent = [system], [system]
        for number, question in enumerate(CHAT, 1):
            yield self._turn(cluster, f"chat {number}", self.chat, Message("user", question))
        yield self._turn(cluster, "agent", self.agent, Message("user", "Find out how warm the sea is along the coast."))
        for number in range(1, self.sizes.tool_turns + 1):
            result = f"station {number}: water {11 + number % 7}.{number % 10} degrees, wind {number * 3 % 20} knots"
            yield self._turn(cluster, f"tool {number}", self.agent, Message("tool", result))

    def resume(self, cluster: LocalCluster) -> Iterator[Turn]:
        """Both go on after the crash."""
        yield self._turn(cluster, "chat, resumed", self.chat, Message("user", AFTER))
        yield self._turn(cluster, "agent, resumed", self.agent, Message("user", AFTER))

    def _turn(self, cluster: LocalCluster, name: str, messages: list[Message], said: Message) -> Turn:
        messages.append(said)
        prompt = chat_prompt(messages, thinking=False)
        asked = inference_pb2.CountTokensRequest(prompt=prompt, include_token_ids=True)
        ids = tuple(cluster.client.count_tokens(asked).token_ids)
        sampling = common_pb2.SamplingParams(temperature=0, seed=1)
        if self.family.letters_only:
            letters = inference_pb2.TextPrompt(text="abcdefghijklmnopqrstuvwxyz ")
            asked = inference_pb2.CountTokensRequest(prompt=inference_pb2.Prompt(text=letters), include_token_ids=True)
            tokens = cluster.client.count_tokens(asked).token_ids[-27:]
            sampling.logit_bias.extend(common_pb2.LogitBias(token_id=token, bias=100) for token in tokens)
        stop = common_pb2.StopParams(max_tokens=self.sizes.answer_tokens)
        agent = messages is self.agent
        request = inference_pb2.GenerateRequest(
            prompt=prompt,
            sampling=sampling,
            stop=stop,
            traffic_class=common_pb2.TRAFFIC_CLASS_AGENT if agent else common_pb2.TRAFFIC_CLASS_CHAT,
            report=True,
        )
        answer = gather(cluster.client.generate(request, 600.0))
        if answer.usage is None or answer.report is None:
            raise TourFailed(f"{name} ended without usage or report")
        messages.append(Message("assistant", answer.text))
        turn = Turn(name, ids, tuple(answer.token_ids), answer.text, answer.usage, answer)
        self.turns.append(turn)
        return turn


def system_text(cluster: LocalCluster, tokens: int) -> str:
    """At least so many tokens of rules, no two alike."""
    rules: list[str] = ["You answer questions about water. These are the rules."]
    while True:
        for _ in range(16):
            n = len(rules)
            rules.append(f"Rule {n}: a note of kind {n * 7 % 13} from place {n * 11 % 97} counts {n * 3 % 10} times.")
        prompt = chat_prompt([Message("system", " ".join(rules)), Message("user", "?")], thinking=False)
        counted = cluster.client.count_tokens(inference_pb2.CountTokensRequest(prompt=prompt))
        if counted.prompt_tokens >= tokens:
            return " ".join(rules)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def until_written(cluster: LocalCluster) -> None:
    """Wait until the workers have given everything to the store: here a person reads, or a tool runs."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        tiers = cluster.client.cache_stats().tiers
        waiting = sum(tier.queued_entries for tier in tiers if tier.tier == control_pb2.CACHE_TIER_STORE)
        copied = sum(tier.pinned for tier in tiers if tier.tier == control_pb2.CACHE_TIER_DEVICE)
        if not waiting and not copied:
            return
        if time.monotonic() > deadline:
            raise TourFailed(f"{waiting} entries are still not written, {copied} not copied")
        time.sleep(0.05)


class Checks:
    """Judges turns and shows them."""

    def __init__(self, family: Family, block: int) -> None:
        self.family = family
        self.block = block
        self.failures: list[str] = []
        self.table = Table(header_style="bold", title=f"{family.name}: block {block}, keep {family.keep}")
        for name in ("turn", "prompt", "m", "bound", "cached", "loaded", "computed", "TTFT", "loaded bytes"):
            self.table.add_column(name, justify="left" if name == "turn" else "right")

    def bound(self, m: int) -> int:
        return max(0, self.block * ((m - self.family.keep) // self.block))

    def judge(self, turn: Turn, earlier: Sequence[Turn], *, durable: Sequence[Turn] | None = None) -> None:
        """`durable`: turns whose writes are older than a second; None: all of them."""
        m = max((common(one.known, turn.prompt) for one in (earlier if durable is None else durable)), default=0)
        bound, usage = self.bound(m), turn.usage
        found = usage.cached_tokens + usage.loaded_tokens
        good = found >= bound
        if not good:
            self.failures.append(f"{turn.name}: {found} tokens cached or loaded, {bound} expected (m = {m})")
        if found + usage.computed_tokens != usage.prompt_tokens or usage.prompt_tokens != len(turn.prompt):
            self.failures.append(f"{turn.name}: tokens do not add up: {usage}")
        report = turn.answer.report
        assert report is not None
        numbers = (len(turn.prompt), m, bound, usage.cached_tokens, usage.loaded_tokens, usage.computed_tokens)
        self.table.add_row(
            turn.name if good else f"[red]{turn.name}[/red]",
            *map(str, numbers),
            human_seconds(report.times.first_token_us / 1e6),
            human_bytes(report.bytes.loaded_bytes),
        )


def tour(family: Family, sizes: Sizes, scratch: Path) -> list[str]:
    """One model; what failed."""
    store = scratch / f"store-{family.name}"
    spec = ClusterSpec(family.folder, sizes.replicas, store=str(store), sets=(*PATIENT, *EXACT, *EAGER))
    talk = Conversations(family, sizes)
    console.rule(f"{family.name}: with a store")
    with mortal(spec) as cluster:
        (model,) = cluster.client.models().models
        checks = Checks(family, model.block_tokens)
        for turn in talk.play(cluster):
            checks.judge(turn, talk.turns[:-1])
            console.print(f"{turn.name}: {len(turn.prompt)} tokens", style="dim")
            # The last answer is followed by the crash at once.
            if turn.name != f"tool {sizes.tool_turns}":
                until_written(cluster)
        for child in cluster.children:
            child.kill()
        console.print("every process killed (SIGKILL) right after the last answer", style="yellow")
    crashed = len(talk.turns)
    with mortal(spec) as cluster:
        for turn in talk.resume(cluster):
            # What the last turn before the crash wrote may be lost: it was less than a second old.
            checks.judge(turn, talk.turns[:-1], durable=talk.turns[: crashed - 1])
            if turn.usage.cached_tokens + turn.usage.computed_tokens == len(turn.prompt):
                checks.failures.append(f"{turn.name}: nothing was loaded from the store")
    console.rule(f"{family.name}: the same with the cache off")
    plain = Conversations(family, sizes)
    with LocalCluster(ClusterSpec(family.folder, sizes.replicas, sets=(*PATIENT, *EXACT, *OFF))) as cluster:
        for turn in chain(plain.play(cluster), plain.resume(cluster)):
            console.print(f"{turn.name}: computed {turn.usage.computed_tokens} tokens", style="dim")
            if turn.usage.cached_tokens or turn.usage.loaded_tokens:
                checks.failures.append(f"{turn.name}: the cache is not off")
    for with_store, without in zip(talk.turns, plain.turns, strict=True):
        if (with_store.prompt, with_store.output) != (without.prompt, without.output):
            checks.failures.append(f"{with_store.name}: other tokens than with the cache off")
    console.print(checks.table)
    if not checks.failures:
        console.print(f"[green]✓[/green] {len(talk.turns)} turns: every bound holds, tokens are those without a cache")
    return [f"{family.name}: {failure}" for failure in checks.failures]


@contextmanager
def mortal(spec: ClusterSpec) -> Iterator[LocalCluster]:
    """A cluster that may have been killed when it is left."""
    cluster = LocalCluster(spec)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop(drain=False)


def v41(scratch: Path) -> Family:
    """The tiny V4.1 with room for a long prompt (its rotary scaling reaches further than its config says)."""
    folder = scratch / "deepseek-v41-tiny"
    shutil.copytree(make("deepseek-v41-tiny", None, 0), folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    text["max_position_embeddings"] = CONTEXT
    path.write_text(json.dumps(config), encoding="utf-8")
    backtracking = 6
    return Family("DeepSeek-V4.1-tiny", folder, int(text["sliding_window"]) + 2 * backtracking, letters_only=True)


def v3(folder: Path | None) -> Family:
    """SmolLM2 re-expressed in DeepSeek-V3's architecture, or another folder of that family."""
    if folder is not None:
        return Family(folder.name, folder, 1, letters_only=True)
    folders = {each.name: each for each in fetch("smollm2", None, None)}
    return Family("SmolLM2 as DeepSeek-V3", folders["smollm2-float32"], 1, letters_only=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="600 tokens of system prompt, 4 tool turns, 1 + 1 workers")
    parser.add_argument("--family", choices=("v3", "v41"), action="append", help="only this one")
    parser.add_argument(
        "--v3", type=Path, metavar="FOLDER", help="a DeepSeek-V3 folder with a chat template, instead of SmolLM2"
    )
    options = parser.parse_args(arguments)
    full = Sizes(4000, 20, 24, {"prefill": 2, "decode": 2})
    sizes = Sizes(600, 4, 24, {"prefill": 1, "decode": 1}) if options.quick else full
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="headrace-cache-tour-") as scratch:
        for family in options.family or ("v41", "v3"):
            model = v41(Path(scratch)) if family == "v41" else v3(options.v3)
            failures += tour(model, sizes, Path(scratch))
    for failure in failures:
        console.print(failure, style="bold red", markup=False)
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (TourFailed, CliError, HeadraceError) as failed:
        console.print(f"the tour failed: {failed}", style="bold red", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
