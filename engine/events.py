"""What leaves the engine thread: typed events of requests, and the values in them.

Events of one step leave together and in order through one outbox callback, called on the engine thread; RPC code hands
them to its loop (`loop.call_soon_threadsafe`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from headrace.engine.errors import EngineError
from headrace.engine.request import RequestKey

if TYPE_CHECKING:
    from headrace.kvcache.transfer.pushes import Ready


class FinishReason(enum.Enum):
    """How a choice ended (spec/protocol.md, "Events to the client")."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a delivered token and of the `top` most likely ones, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class BlockRow:
    """Where block `block` of a request's prompt lies in this worker's pool."""

    block: int
    row: int


@dataclass(frozen=True)
class PromptCounts:
    """Origins of the prompt's tokens: cached + loaded + computed = prompt length; recomputed apart (L27)."""

    cached: int = 0
    loaded: int = 0
    computed: int = 0
    recomputed: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds on the engine's clock, for reports."""

    wait_s: float = 0.0
    """Queued, or from reservation to commit."""
    work_s: float = 0.0
    """From the first chunk, or the commit, to the end."""
    verify_s: float = 0.0
    """Decode: copying landed rows in and checking them."""


@dataclass(frozen=True)
class FirstToken:
    """The token prefill sampled for a choice. `logprob` is None unless the request asked for logprobs."""

    choice: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class Tokens:
    """Delivered tokens of one choice; `offset` counts tokens of the choice before them, delivered ones included."""

    key: RequestKey
    choice: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The one terminal event of a choice (L28)."""

    key: RequestKey
    choice: int
    reason: FinishReason
    completion_tokens: int
    stop_match: str | int | None = None
    """The stop string or stop token id that ended it."""
    error: EngineError | None = None


@dataclass(frozen=True)
class Usage:
    """Follows the last Finished of a request; nothing follows it."""

    key: RequestKey
    prompt_tokens: int
    completion_tokens: int
    """Over all choices, delivered by earlier attempts included."""
    counts: PromptCounts
    preemptions: int = 0
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True)
class PrefillAccepted:
    """The request was admitted; `cached` prompt tokens are in this worker's pool already."""

    key: RequestKey
    prompt_tokens: int
    cached: int


@dataclass(frozen=True)
class Progress:
    key: RequestKey
    computed: int
    """Prompt tokens whose rows are final, cached ones included."""


@dataclass(frozen=True)
class RowsReady:
    """Finished rows to push. Each is mentioned once and stays pinned until Unpin names it (L7)."""

    key: RequestKey
    rows: tuple[BlockRow, ...]
    ready: Ready | None = field(default=None, compare=False)
    """On a GPU: passed once the kernels that write the rows have run; a step that samples nothing waits for nobody.
    For the push."""


@dataclass(frozen=True)
class PrefillDone:
    """The prompt is computed. `tail` is the partial block's row if N₀ is no block multiple, `slot` the state slot that
    every choice starts from (0 when the layout has none); both are pinned like RowsReady's rows."""

    key: RequestKey
    first: tuple[FirstToken, ...]
    tail: BlockRow | None
    slot: int
    counts: PromptCounts
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True)
class PrefillFailed:
    """Terminal. Pins of rows already mentioned last until Unpin, since transfers may still read them."""

    key: RequestKey
    reason: FinishReason
    error: EngineError


Event: TypeAlias = Tokens | Finished | Usage | PrefillAccepted | Progress | RowsReady | PrefillDone | PrefillFailed
Outbox: TypeAlias = Callable[[tuple[Event, ...]], None]
