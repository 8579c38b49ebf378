"""What RPC code may say to the engine thread: typed commands, each naming the type of its reply.

A command is answered between two steps through a `concurrent.futures.Future` (an EngineError is its exception). RPC
code touches neither pool nor model nor scheduler. Events (engine/events.py) are importable from here too.

    role      commands                                   events of a request, in order
    whole     Submit, Credit, Cancel                     Tokens… Finished per choice, then Usage
    prefill   Prefill, Unpin, HandedOver, Cancel         PrefillAccepted, RowsReady / Progress…,
                                                         PrefillDone | PrefillFailed
    decode    Reserve, Commit, TransferEnded, SenderDied,
              GetQuarantined,
              Renew, Credit, Cancel                      Tokens… Finished per choice, then Usage
    all       EndAll, GetStatus, CheckIntegrity
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from headrace.engine.events import (
    BlockRow,
    Event,
    Finished,
    FinishReason,
    FirstToken,
    Outbox,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    Progress,
    PromptCounts,
    RowsReady,
    Timings,
    TokenLogprob,
    Tokens,
    Usage,
)
from headrace.engine.reports import Conservation, EngineStatus, PoolCounts
from headrace.engine.request import EngineRequest, RequestKey
from headrace.kvcache.handle import Handle
from headrace.kvcache.landing_types import NoticeResult, PartChecksums

if TYPE_CHECKING:
    from headrace.kvcache.landing import LandingRegion  # noqa: F401 - named in base classes' arguments only

ReplyT = TypeVar("ReplyT")


class Command(Generic[ReplyT]):
    """A piece of work for the engine thread; `EngineWorker.call` gives a Future of ReplyT."""


@dataclass(frozen=True)
class Submit(Command[None]):
    """Whole role: queue a request. Refusals: INVALID_ARGUMENT, RESOURCE_EXHAUSTED, ABORTED."""

    request: EngineRequest


@dataclass(frozen=True)
class Prefill(Command["Queued"]):
    """Prefill role: compute the prompt and sample first tokens. Refusals as Submit.

    `held_blocks` leading blocks are at decode already and are not reported for pushing.
    """

    request: EngineRequest
    held_blocks: int = 0


@dataclass(frozen=True)
class Queued:
    """What stands before a request that was just taken."""

    position: int
    tokens: int
    """Prompt tokens still to be computed for the requests before it, running ones included."""


@dataclass(frozen=True)
class HandedOver(Command[None]):
    """Prefill role: decode has admitted the request; it is finished here. Unknown keys are no error."""

    key: RequestKey


@dataclass(frozen=True)
class Unpin(Command[None]):
    """The transfers that read these rows (and the slot) are terminal (L7). NOT_FOUND if one is not pinned."""

    key: RequestKey
    rows: tuple[int, ...] = ()
    slot: bool = False


@dataclass(frozen=True)
class Reserve(Command["Reserved"]):
    """Decode role: book ⌈(N₀ + 1)/block⌉ blocks, n slots, and landing rows for what has to be sent (L23).

    Idempotent by (request, attempt): asked twice it answers the same; a higher attempt aborts the lower (L16), a
    lower one is refused ABORTED. NEVER_FITS, or RESOURCE_EXHAUSTED if not now.
    """

    request: EngineRequest
    sender: str | None = None
    """Incarnation that will write, where it is known already."""
    compute_here: bool = False
    """No peer writes: the prompt is computed here, if what is not cached fits the budget of a step beside what runs.
    It begins with the first credit."""


@dataclass(frozen=True)
class Reserved:
    key: RequestKey
    held_blocks: int
    """Leading blocks this worker already holds, kept for the reservation: they need no transfer."""
    handle: Handle | None
    """Landing rows for blocks [held_blocks, ⌈N₀/block⌉) and, if the layout has slots, one slot for all choices: a
    single part, whose `choice` is None. None when the prompt is computed here."""
    lease_s: float


@dataclass(frozen=True)
class Commit(Command["Committed"]):
    """Decode role: the sender's terminal notice of a whole transfer (spec/protocol.md). The engine copies the landed
    rows into its pool, verifies the copies, and admits the request at this step boundary.

    NOT_FOUND when the reservation is gone; FAILED_PRECONDITION when handle, first tokens or counts are not exact (L1);
    the landing rows are free again in either case. Repeating a commit that succeeded succeeds and does nothing.
    """

    key: RequestKey
    handle: Handle
    """As granted by Reserve, or by the resend of an earlier Commit."""
    checksums: tuple[PartChecksums, ...]
    first: tuple[FirstToken, ...]
    counts: PromptCounts
    sender: str | None = None
    """Incarnation that has written, and writes again what did not match."""


@dataclass(frozen=True)
class Committed:
    resend: Handle | None = None
    """None: the request runs. Else a new grant for what did not match its checksum; push it and commit again."""


@dataclass(frozen=True)
class TransferEnded(Command[NoticeResult]):
    """Decode role: a terminal notice that came another way than by Commit (the wire, EndTransfer)."""

    transfer_id: str
    complete: bool
    """Every row landed. False: none will be committed, the rows may be granted again."""


@dataclass(frozen=True)
class SenderDied(Command[tuple[RequestKey, ...]]):
    """Decode role: the process of this incarnation is known dead, not merely silent (L6); frees what it might have
    written. Answers the reservations that were waiting for it; they stay, the router decides."""

    incarnation: str


@dataclass(frozen=True)
class RebuildLanding(Command["LandingRegion"]):
    """Decode role: too much is quarantined (EngineStatus.landing_sound). Answers a fresh region for new grants, to be
    registered with the transfer engine; the old one stays registered until TakeDrainedLandings answers it."""


@dataclass(frozen=True)
class TakeDrainedLandings(Command["tuple[LandingRegion, ...]"]):
    """Decode role: replaced landing regions whose every transfer is terminal: deregister them, their memory may go."""


@dataclass(frozen=True)
class Renew(Command[tuple[RequestKey, ...]]):
    """Extend leases (L8); answers the keys that are not known here any more."""

    keys: tuple[RequestKey, ...]


@dataclass(frozen=True)
class Credit(Command[None]):
    """Tokens, over all choices and from the attempt's start, that may be emitted in all. Cumulative, so a repeat
    changes nothing; at the limit only this request pauses. A step begun below it may pass it by n − 1 tokens."""

    key: RequestKey
    limit: int


@dataclass(frozen=True)
class Cancel(Command[bool]):
    """End every attempt of a request up to this one, in any state, with `reason`; terminal events follow on the outbox.

    Answers whether something was live: a cancel may cross the request's own end.
    """

    key: RequestKey
    reason: FinishReason = FinishReason.CANCELLED


@dataclass(frozen=True)
class EndAll(Command[None]):
    """End every request that lives with UNAVAILABLE and this reason: routers continue them elsewhere (L19)."""

    reason: str


@dataclass(frozen=True)
class GetQuarantined(Command["tuple[tuple[Handle, str | None], ...]"]):
    """Decode role: grants that nobody waits for and whose sender has not said its last word; and the sender."""


@dataclass(frozen=True)
class GetStatus(Command[EngineStatus]):
    pass


@dataclass(frozen=True)
class CheckIntegrity(Command[tuple[str, ...]]):
    """Answers every broken invariant in words; empty is sound. `idle` also demands that nothing is held (L11)."""

    idle: bool = False


__all__ = [
    "BlockRow",
    "Cancel",
    "CheckIntegrity",
    "Command",
    "Commit",
    "Committed",
    "Conservation",
    "Credit",
    "EndAll",
    "EngineStatus",
    "Event",
    "FinishReason",
    "Finished",
    "FirstToken",
    "GetQuarantined",
    "GetStatus",
    "HandedOver",
    "Outbox",
    "PoolCounts",
    "Prefill",
    "PrefillAccepted",
    "PrefillDone",
    "PrefillFailed",
    "Progress",
    "PromptCounts",
    "Queued",
    "RebuildLanding",
    "Renew",
    "ReplyT",
    "Reserve",
    "Reserved",
    "RowsReady",
    "SenderDied",
    "Submit",
    "TakeDrainedLandings",
    "Timings",
    "TokenLogprob",
    "Tokens",
    "TransferEnded",
    "Unpin",
    "Usage",
]
