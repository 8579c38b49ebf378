"""One choice of a request inside a worker: its tokens, what of them is computed, and the memory that holds it.

Prefill, decode, recomputation and continuation are one thing here: tokens [0, computed) have their KV in the blocks and
slot, tokens [computed, known) are pending, and a step that computes the last pending token samples the next.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine.events import TokenLogprob

if TYPE_CHECKING:
    from headrace.engine.live import LiveRequest
    from headrace.engine.masks.matcher import ChoiceMask
    from headrace.engine.output import ChoiceOutput
    from headrace.engine.spill import Spilled


class State(enum.Enum):
    QUEUED = "queued"
    """Holds nothing, or only spilled memory; waits for the scheduler."""
    RUNNING = "running"
    """Holds its rows and slot; takes part in steps."""
    RESERVED = "reserved"
    """Decode role: holds rows and slot for a prompt that is on its way."""
    HANDED_OVER = "handed over"
    """Prefill role: everything is computed; memory is held until the transfer is over."""
    ENDED = "ended"


@dataclass(eq=False)
class Sequence:
    """One choice; before the prompt is computed choice 0 stands for all n of them (the leader)."""

    live: LiveRequest
    choice: int
    seed: int
    out: ChoiceOutput | None = None
    """Detokenizer and stop conditions; None in the prefill role, which emits nothing."""
    mask: ChoiceMask | None = None
    """Where it stands in the request's language; made at the first masked step."""
    output: list[int] = field(default_factory=list)
    """Tokens after the prompt: delivered by an earlier attempt, then sampled here."""
    computed: int = 0
    state: State = State.QUEUED
    blocks: list[int] = field(default_factory=list)
    """Pool rows; block j holds positions [j·block, (j+1)·block)."""
    slot: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    """Keys of the leading blocks as far as they were needed."""
    committed: int = 0
    """Leading blocks whose rows the prefix cache knows by key."""
    decode_snapshots: deque[tuple[bytes, int]] = field(default_factory=deque)
    """Blocks at whose ends decode took snapshots, by key and end position; the last few are kept."""
    offered: int = 0
    """Leading blocks that the tier was offered, or that were not computed here."""
    due_snapshots: deque[tuple[bytes, int]] = field(default_factory=deque)
    """Snapshots that the tier is yet to be offered, like decode_snapshots."""
    snapshots_due_to: int = 0
    """Position of the last of them that there ever was."""
    spilled: Spilled | None = None
    high: int = 0
    """One past the highest position ever computed here: computing below it again is recomputation (L27)."""
    alone: bool = False
    """Ran in a step that failed: runs by itself until a step succeeds, so that the guilty one is found (L13)."""
    started: bool = False
    """Has held memory before: it is ahead of requests that never ran."""

    @property
    def owner(self) -> str:
        """Name under which the pool knows this sequence's references."""
        return f"{self.live.request.key}/{self.choice}"

    @property
    def known(self) -> int:
        """Positions whose token is known."""
        return self.live.prompt_length + len(self.output)

    @property
    def pending(self) -> int:
        return self.known - self.computed

    @property
    def age(self) -> tuple[int, int]:
        """Order of admission; the largest is the youngest and is preempted first."""
        return (self.live.order, self.choice)

    @property
    def is_leader(self) -> bool:
        """Stands for all choices: n > 1 and the prompt is not computed yet."""
        return self.choice == 0 and len(self.live.sequences) < self.live.request.n

    def token(self, position: int) -> int:
        prompt = self.live.request.prompt_ids
        return prompt[position] if position < len(prompt) else self.output[position - len(prompt)]

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids of positions [start, end)."""
        prompt = self.live.request.prompt_ids
        length = len(prompt)
        ids = list(prompt[start : min(end, length)]) if start < length else []
        if end > length:
            ids += self.output[max(start - length, 0) : end - length]
        return ids


@dataclass(frozen=True)
class SampledToken:
    """One sampled token on the host."""

    token_id: int
    logprob: TokenLogprob | None
