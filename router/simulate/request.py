"""A request on its way through a simulation, and one attempt at it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class End(enum.Enum):
    """Exactly one for every request (L28)."""

    FINISHED = "finished"
    FAILED = "failed"
    """Its attempts were used up, or it was answering when its decode rank died and continuations are off."""
    REFUSED = "refused"
    """No rank could ever hold it, or nobody had room for as long as the router is patient."""


@dataclass(eq=False, slots=True)
class SimRequest:
    """What arrived, and what became of it. Times are seconds of simulated time."""

    number: int
    arrived: float
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[bytes]
    """Of the full blocks of its prompt."""
    attempts: int = 0
    delivered: int = 0
    """Tokens that the client has."""
    first_at: float | None = None
    """When its client had the first token."""
    ended_at: float | None = None
    end: End | None = None
    hit_tokens: int = 0
    """Cached and loaded prompt tokens of the attempt that came through."""
    loaded_tokens: int = 0
    """Of these, from the store."""
    recomputed_tokens: int = 0
    """Prompt and delivered tokens that attempts after the first computed again."""
    waited_since: float | None = None
    """Since when it waits for room at decode."""

    @property
    def open(self) -> bool:
        return self.end is None


class Stage(enum.Enum):
    """Where an attempt is."""

    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    OVER = "over"


@dataclass(eq=False, slots=True)
class Attempt:
    """One try: a prefill rank, a decode rank, what each still has to do. Either rank is -1 where its side is not
    simulated."""

    request: SimRequest
    key: str
    """Of its work in the fleet: request and attempt."""
    prefill_rank: int
    decode_rank: int
    prompt_tokens: int
    """With what was delivered before: a continuation computes that too (L15)."""
    output_tokens: int
    """Still to be generated."""
    stage: Stage = Stage.PREFILL
    begun: bool = False
    """Prefill has looked the prefix up and computes."""
    hit_tokens: int = 0
    loaded_tokens: int = 0
    left: int = 0
    """Prompt tokens that still have to be computed."""
    ready_at: float = 0.0
    """When what it loads from the store has arrived."""
    submitted_at: float = 0.0
    handed_over_at: float = 0.0
    decode_life: int = 0
    """Of its decode replica, when it promised room."""
    finish_step: int = 0
    """The step of its decode replica at whose end it has its last token."""
