"""What the balancers need to know of a request. No ids of tokens, no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.kvcache.keys import Key


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A validated request. Times are on the caller's monotonic clock, in seconds."""

    request_id: str
    prompt_tokens: int
    """N₀, images expanded."""
    max_tokens: int
    choices: int
    image_tokens: int
    affinity_key: bytes
    """Key of the first block (or of its root, for a prompt below one block): equal prompts meet by it."""
    deadline: float
    blocks: Sequence[Key] = ()
    """Keys of the prompt's full blocks."""
    snapshots: Sequence[Key] | None = None
    """Key of the snapshot behind each block; None where the layout has none."""
    usable_tokens: int = 0
    """The longest cached prefix that may be used (bounded replay, or the last token that has to be computed)."""


def usable_tokens(prompt_tokens: int, keep_tokens: int, window: int, replay: bool) -> int:
    """The longest prefix that may come from a cache: N₀ − K where the model has a window (none with replay off), else
    all but the last token, which has to be computed to have logits (spec/protocol.md, Length and replay)."""
    if not window:
        return max(0, prompt_tokens - 1)
    return max(0, prompt_tokens - keep_tokens) if replay else 0
