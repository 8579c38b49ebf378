"""What is simulated: the cluster and its delays."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.router.cost.curves import DecodeCurve
from headrace.router.simulate.models import DecodeModel, PrefillModel, PublishedPrefill
from headrace.router.simulate.offline import Unit


@dataclass(frozen=True, slots=True)
class Store:
    """A shared store: what one rank loads from it, and how long a block takes to get there."""

    bytes_per_s: float = 12.5e9
    """100 Gbit/s per rank."""
    bytes_per_token: float = 891.0
    """Of KV: a row of 114,048 bytes holds 128 tokens (DeepSeek-V4.1)."""
    delay_s: float = 1.0

    @property
    def tokens_per_s(self) -> float:
        return self.bytes_per_s / self.bytes_per_token


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks, engines, memories and delays. A side of 0 ranks is not simulated: without decode a request ends with its
    first token, without prefill it arrives with one."""

    prefill_ranks: int
    decode_ranks: int
    ranks_per_prefill_replica: int = 1
    ranks_per_decode_replica: int | None = None
    """Ranks of a replica step together. None: all decode ranks are one replica."""
    prefill: PrefillModel = field(default_factory=PublishedPrefill)
    decode: DecodeModel = field(default_factory=DecodeCurve)
    batch_tokens: int = 32_768
    step_s: float = 0.050
    """Objective for the time of a token."""
    cache_blocks: int | None = None
    """Device cache of a prefill rank; None: infinite."""
    store: Store | None = None
    kv_tokens: int = 16_777_216
    """KV memory of a decode rank; by default it is not what limits."""
    slots: int = 0
    """Sequences of a decode rank; 0: unlimited."""
    context_tokens: int = 1_048_576
    report_s: float = 1.0
    """How often every rank reports its load; the first at a random moment."""
    event_delay_s: float = 0.05
    """From the end of a batch until the router's index knows what it left in the cache."""
    transfer_s: float = 0.005
    """From the last batch of a prompt until decode has verified its rows."""
    detect_s: float = 1.0
    """From a death until the router sees it; requests that meet it dead fail at once and go elsewhere."""
    change_s: float = 20.0
    """From the end of a drain until the replica serves in its new role."""
    patience_s: float = 10.0
    """How long a request waits for room at decode before it is refused."""
    max_attempts: int = 3
    continuation: bool = False
    """Whether a stream whose decode rank died goes on elsewhere (L15); else it ends with an error."""

    def __post_init__(self) -> None:
        if self.prefill_ranks < 0 or self.decode_ranks < 0 or self.prefill_ranks + self.decode_ranks < 1:
            raise ValueError("a cluster needs ranks of at least one role")
        if self.ranks_per_prefill_replica < 1 or self.prefill_ranks % self.ranks_per_prefill_replica:
            raise ValueError(
                f"{self.prefill_ranks} prefill ranks do not divide into replicas of {self.ranks_per_prefill_replica}"
            )
        if self.decode_ranks and self.decode_ranks % self.decode_group:
            raise ValueError(f"{self.decode_ranks} decode ranks do not divide into replicas of {self.decode_group}")

    @property
    def decode_group(self) -> int:
        """Ranks of a decode replica."""
        return self.ranks_per_decode_replica or self.decode_ranks

    @property
    def unit(self) -> Unit:
        """For the offline bound."""
        return Unit(self.prefill_ranks, self.decode_ranks, self.prefill, self.decode, self.batch_tokens, self.step_s)
