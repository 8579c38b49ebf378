"""A request while it lives in a worker: its choices, limits, lease and the counts for its usage record."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.messages import FinishReason, PromptCounts, Timings
from headrace.engine.replay import ReplayPlan
from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.seeds import choice_seed
from headrace.engine.sequence import Sequence, State


@dataclass(eq=False)
class LiveRequest:
    """Owned by the engine thread. `sequences` holds the leader alone until the prompt is computed, then `width`."""

    request: EngineRequest
    order: int
    """Counts admissions of this worker; the age of preemption."""
    replay: ReplayPlan
    width: int
    """Choices that run here after the prompt: n, or 1 in the prefill role, which samples n first tokens, forks none."""
    lease_until: float | None = None
    """Decode role: without renewal until then the router is dead (L8). None has no lease."""
    held_blocks: int = 0
    """Leading blocks that decode holds already (prefill: need no push; decode: need no landing)."""
    sequences: list[Sequence] = field(default_factory=list)
    spare_rows: list[int] = field(default_factory=list)
    """Tail rows of choices 1 … n − 1, booked with the prompt so that the fork cannot fail."""
    spare_slots: list[int] = field(default_factory=list)
    credit_limit: int | None = None
    paused_at: float | None = None
    """Since when it has had no credit, on the engine's clock (pauses.py)."""
    sampled: int = 0
    """Tokens sampled here, over all choices."""
    preemptions: int = 0
    accepted_at: float = 0.0
    begun_at: float | None = None
    """First step, or commit, on the engine's clock."""
    verify_s: float = 0.0
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    """Terminal reason of every choice that ended (L28)."""
    completion_tokens: int = 0
    cached: int = 0
    loaded: int = 0
    computed: int = 0
    recomputed: int = 0
    loaded_blocks: frozenset[int] = frozenset()
    """Blocks that came from the tier for this request; reused ones count as loaded, not cached (L27)."""
    reported_blocks: int = 0
    """Prefill role: leading blocks already reported by RowsReady or held by decode."""
    computes_here: bool = False
    """Decode role: the prompt is computed here, no peer sends it."""
    accepted_told: bool = False
    """Prefill role: PrefillAccepted is out; a second admission, after preemption, does not repeat it."""
    done_told: bool = False
    """Prefill role: PrefillDone is out and was the terminal event (L28)."""

    def __post_init__(self) -> None:
        self.credit_limit = self.request.credit

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @property
    def prompt_length(self) -> int:
        return self.request.prompt_length

    @property
    def has_credit(self) -> bool:
        return self.credit_limit is None or self.sampled < self.credit_limit

    @property
    def set_aside(self) -> bool:
        """Paused for want of credit, and out of the pool."""
        return self.paused_at is not None and all(
            sequence.state in (State.QUEUED, State.ENDED) for sequence in self.sequences
        )

    @property
    def prompt_counted(self) -> int:
        """Prompt tokens whose origin is counted; the rest is still to come."""
        return self.cached + self.loaded + self.computed

    def timings(self, now: float) -> Timings:
        begun = now if self.begun_at is None else self.begun_at
        return Timings(begun - self.accepted_at, now - begun, self.verify_s)

    @property
    def counts(self) -> PromptCounts:
        return PromptCounts(self.cached, self.loaded, self.computed, self.recomputed)

    @property
    def ended(self) -> bool:
        return len(self.reasons) == self.request.n

    def seed_of(self, choice: int) -> int:
        """Choice 0 uses the request's seed, so that it equals n = 1 (spec/protocol.md, "Exactness")."""
        return choice_seed(self.request.seed, choice)

    def new_sequence(self, choice: int) -> Sequence:
        """A choice that knows the prompt and what an earlier attempt delivered."""
        delivered = list(self.request.delivered_to(choice))
        return Sequence(self, choice, self.seed_of(choice), output=delivered)

    def new_leader(self) -> Sequence:
        """Choice 0, which computes the prompt for all: with n > 1 it knows the prompt alone until the fork."""
        leader = self.new_sequence(0)
        if self.request.n > 1:
            leader.output = []
        self.sequences.append(leader)
        return leader

    def count_reused(self, tokens: int, block_tokens: int) -> None:
        """Book a prefix of `tokens` that the pool held at admission; what was counted before stays as it was (L27)."""
        start, end = self.prompt_counted, min(tokens, self.prompt_length)
        if end <= start:
            return
        spans = ((block * block_tokens, (block + 1) * block_tokens) for block in self.loaded_blocks)
        loaded = sum(max(0, min(end, last) - max(start, first)) for first, last in spans)
        self.loaded += loaded
        self.cached += end - start - loaded

    def count_computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Book positions [start, end) of a forward pass by origin (L27)."""
        length = self.prompt_length
        fresh = max(0, min(end, length) - max(start, self.prompt_counted))
        self.computed += fresh
        first_new = length + len(self.request.delivered_to(sequence.choice))
        again = max(0, min(end, first_new) - start) - fresh
        again += max(0, min(end, sequence.high) - max(start, first_new))
        self.recomputed += again
        sequence.high = max(sequence.high, end)
