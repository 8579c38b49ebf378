"""Requests whose answers are known: taken before anything is sent, and the same ever after (L5)."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from headrace.v1 import common_pb2, inference_pb2
from tests.fuzz.seeds import picture
from tests.fuzz.send import Outcome
from tests.fuzz.world import NEIGHBOUR, World

GENERATE: Final = "InferenceService/Generate"
Tokens = dict[int, tuple[int, ...]]
"""Choice → its tokens."""


def canaries() -> dict[str, inference_pb2.GenerateRequest]:
    """Greedy, seeded with two choices, and with an image."""
    stop = common_pb2.StopParams(max_tokens=6, ignore_eos=True)
    text = inference_pb2.Prompt(text=inference_pb2.TextPrompt(text="The wheel turns in the headrace. " * 3))
    seeded = common_pb2.SamplingParams(temperature=1.0, seed=77, n=2)
    parts = [
        inference_pb2.ContentPart(text="What is this?"),
        inference_pb2.ContentPart(image=inference_pb2.Image(data=picture(200))),
    ]
    message = inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content=parts)
    chat = inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=[message]))
    greedy = common_pb2.SamplingParams(temperature=0.0, seed=1)
    return {
        "greedy": inference_pb2.GenerateRequest(prompt=text, sampling=greedy, stop=stop),
        "seeded": inference_pb2.GenerateRequest(prompt=text, sampling=seeded, stop=stop),
        "image": inference_pb2.GenerateRequest(prompt=chat, sampling=greedy, stop=stop),
    }


def tokens_of(outcome: Outcome) -> Tokens | None:
    """The answer; None where the stream did not end as it should: OK, every choice by LENGTH, each event once (L28)."""
    if outcome.status != "OK":
        return None
    tokens: dict[int, list[int]] = {}
    ended: Counter[int] = Counter()
    for data in outcome.responses:
        event = inference_pb2.GenerateResponse.FromString(data)
        if event.HasField("tokens"):
            known = tokens.setdefault(event.tokens.choice, [])
            if event.tokens.offset != len(known) or ended[event.tokens.choice]:
                return None
            known.extend(event.tokens.token_ids)
        if event.HasField("finished"):
            ended[event.finished.choice] += 1
            if event.finished.reason != common_pb2.FINISH_REASON_LENGTH:
                return None
    if not tokens or any(ended[choice] != 1 for choice in tokens):
        return None
    return {choice: tuple(ids) for choice, ids in tokens.items()}


async def ask(world: World, request: inference_pb2.GenerateRequest, port: str = "router-0") -> Outcome:
    """As the neighbour, who has nothing to do with the fuzzer's tenant."""
    data = [request.SerializeToString()]
    return await world.send(port, world.methods[GENERATE], data, tenant=NEIGHBOUR, patience_s=60.0)


@dataclass
class Canaries:
    """The known answers, and what the neighbour saw."""

    world: World
    known: dict[str, Tokens] = field(default_factory=dict)
    exact: int = 0
    """Answers that were right."""
    refused: Counter[str] = field(default_factory=Counter)
    """The neighbour's requests that ended with a typed error while others did their worst, by its code."""
    violations: list[str] = field(default_factory=list)

    async def learn(self) -> None:
        """Ask each twice; both answers must agree. Raises AssertionError."""
        for name, request in canaries().items():
            first, second = [await ask(self.world, request) for _ in range(2)]
            tokens = tokens_of(first)
            assert tokens is not None, first.row()
            assert tokens == tokens_of(second), (name, first.row(), second.row())
            self.known[name] = tokens

    async def check(self) -> None:
        """With nothing else going on every answer comes, and is right."""
        for name, request in canaries().items():
            self._judge(name, await ask(self.world, request), alone=True)

    async def neighbour(self, until: asyncio.Event, pause_s: float = 0.5) -> None:
        """Ask while the fuzzer sends. A typed refusal is no violation, a wrong token is."""
        while not until.is_set():
            for name in ("greedy", "seeded"):
                self._judge(name, await ask(self.world, canaries()[name]), alone=False)
            await asyncio.sleep(pause_s)

    def _judge(self, name: str, outcome: Outcome, *, alone: bool) -> None:
        tokens = tokens_of(outcome)
        if tokens == self.known[name]:
            self.exact += 1
        elif tokens is not None:
            self.violations.append(f"wrong tokens: canary {name} answers {tokens}, not {self.known[name]}")
        elif alone or outcome.status == "HANGS" or (outcome.status not in ("OK", "LEFT") and not outcome.code):
            self.violations.append(f"canary {name} failed: {outcome.row() | {'sent': []}} {ends_of(outcome)}")
        else:
            self.refused[outcome.code or outcome.status] += 1


def ends_of(outcome: Outcome) -> list[str]:
    """What the stream said at its ends."""
    events = [inference_pb2.GenerateResponse.FromString(data) for data in outcome.responses]
    return [str(event.finished).replace("\n", " ") for event in events if event.HasField("finished")]
