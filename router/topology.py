"""What is balanced over: ranks of one life of one replica (L14), and what each can hold."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Role(enum.Enum):
    """The roles that are balanced over."""

    ENCODER = "encoder"
    PREFILL = "prefill"
    DECODE = "decode"

    # Members are single objects: an enumeration's own hash is a call of Python, some 30 per request.
    __hash__ = object.__hash__


class RankId(NamedTuple):
    """One rank of one life of one replica. A tuple, whose hash and order cost no Python call: it is looked up some ten
    times per request."""

    replica_id: str
    incarnation: str
    rank: int = 0


@dataclass(frozen=True)
class Candidate:
    """A rank that takes work, and what it can hold."""

    id: RankId
    role: Role
    data_centre: str
    host: str
    rows: int
    """Pool rows; 0 for encoders."""
    slots: int
    """Sequences that may run at once; 0 where unlimited."""
    block_tokens: int
    context_tokens: int
    row_bytes: int = 0
    slot_bytes: int = 0
    """What goes with a request's rows from prefill to decode."""
    queue_requests: int = 0
    """Requests that may wait; 0 where it does not tell."""

    def fits(self, prompt_tokens: int, rows: int, choices: int) -> bool:
        """Whether an empty rank could hold the request at all."""
        slots_fit = self.slots == 0 or choices <= self.slots
        return slots_fit and rows <= self.rows and prompt_tokens < self.context_tokens

    def kv_bytes(self, prompt_tokens: int) -> int:
        """What crosses to decode for a prompt computed here."""
        return -(-prompt_tokens // self.block_tokens) * self.row_bytes + self.slot_bytes
