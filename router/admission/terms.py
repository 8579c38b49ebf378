"""What goes into the queue, and what comes out of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request at the door. Times are on the caller's monotonic clock, in seconds."""

    request: str
    tenant: bytes
    priority: int
    """Larger goes first, always."""
    tokens: int
    """Uncached prompt tokens: what it is charged, until prefill tells better (`Admission.correct`)."""
    start_by: float
    """Past this moment its deadline cannot be met any more, however fast it is served from then on."""

    @property
    def cost(self) -> int:
        """A wholly cached prompt costs something too, so that a flood of them is no free ride."""
        return max(1, self.tokens)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of the queue. Raises ValueError for one out of range."""

    max_running: int
    """Requests that are in the cluster at once."""
    max_waiting: int
    """Requests that wait; 0: whoever finds no room is refused."""
    max_waiting_tokens: int = 1 << 62
    """Uncached tokens that wait. A request larger than this waits alone."""
    tenant_share: float = 1.0
    """Of the waiting room that other tenants leave free, one tenant takes at most this share."""
    quantum_tokens: int = 2048
    """What a tenant may take at its turn. Small: finer interleaving; requests above it wait several rounds."""
    room_wait_s: float = 30.0
    """How long a request that no decode rank had room for waits for some."""
    default_retry_after_s: float = 1.0
    """Told while no rate is known."""
    max_retry_after_s: float = 60.0
    rate_window_s: float = 30.0
    """Time over which the drain rate is measured."""

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_waiting < 0 or self.max_waiting_tokens < 1 or self.quantum_tokens < 1:
            raise ValueError(
                "max_running, max_waiting_tokens and quantum_tokens are at least 1, max_waiting at least 0"
            )
        if not 0.0 < self.tenant_share <= 1.0:
            raise ValueError(f"tenant_share is {self.tenant_share}; it must lie in (0, 1]")
        if self.room_wait_s < 0 or not 0 < self.default_retry_after_s <= self.max_retry_after_s:
            raise ValueError("room_wait_s must not be negative, and 0 < default_retry_after_s <= max_retry_after_s")


class Cause(enum.Enum):
    """Why somebody was turned away."""

    REQUESTS = "requests"
    """As many wait as may."""
    TOKENS = "tokens"
    """As many tokens wait as may."""
    TENANT = "tenant"
    """Its tenant fills its share of the queue."""
    DISPLACED = "displaced"
    """It waited, and one of a higher priority took its place."""
    ROOM = "room"
    """No decode rank had room, and it may not wait (any longer)."""
    PREDICTED = "predicted"
    """A balancer foresees that running requests would miss their token times (`Rejected`)."""
    LATE = "late"
    """Its deadline cannot be met any more."""


class Refused(Exception):
    """The request is not, or not any longer, in the queue."""

    def __init__(self, message: str, cause: Cause) -> None:
        super().__init__(message)
        self.cause = cause


class NoPlace(Refused):
    """Overload: come back after `retry_after_s`."""

    def __init__(self, message: str, cause: Cause, retry_after_s: float) -> None:
        super().__init__(f"{message}; try again in {retry_after_s:.1f} s", cause)
        self.retry_after_s = retry_after_s


class TooLate(Refused):
    """The deadline cannot be met any more: waiting on would only keep others from it."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; give it a later deadline or a higher priority", Cause.LATE)


@dataclass(frozen=True, slots=True)
class Changes:
    """What a call brought about. The caller wakes the started, and tells the ended why."""

    started: tuple[str, ...] = ()
    ended: tuple[tuple[str, Refused], ...] = ()
