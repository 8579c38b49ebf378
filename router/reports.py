"""What a rank says of itself, and whether that can be true."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.router.topology import Candidate, Role

MOST_REQUESTS = 1 << 20
"""Requests that run, are promised room or wait at a rank which does not tell how many it takes."""
MOST_IMAGE_TOKENS = 1 << 40
"""That wait at an encoder."""
MOST_STEPS = 1 << 40
"""Thirty years of a thousand steps a second."""
STEPS_PER_S = 100_000
"""No rank steps faster."""
SPARE_STEPS = 1 << 20
"""Beyond what the time allows: reports that waited somewhere arrive together."""


@dataclass(frozen=True, slots=True)
class Report:
    """A rank's own account of itself as of its step `step`."""

    queued_requests: int = 0
    queued_tokens: int = 0
    """Prompt tokens (prefill) or image tokens (encoder) that wait to be computed."""
    running_requests: int = 0
    reserved_requests: int = 0
    """Promised room, no data yet (decode)."""
    kv_tokens: int = 0
    """KV rows in use by requests, in tokens."""
    slots_used: int = 0
    step: int = 0
    """Steps since start; a report of a lower one is older."""
    step_s: float = 0.0
    """Duration of the last step."""

    def tokens(self, role: Role) -> int:
        """KV tokens at decode, waiting tokens elsewhere."""
        return self.kv_tokens if role is Role.DECODE else self.queued_tokens

    @property
    def requests(self) -> int:
        return self.queued_requests + self.running_requests + self.reserved_requests


def absurdity(report: Report, rank: Candidate) -> str | None:
    """Why the report of that rank cannot be true; None if it can. What is absurd is not believed at all (L22)."""
    counts = (
        report.queued_requests,
        report.queued_tokens,
        report.running_requests,
        report.reserved_requests,
        report.kv_tokens,
        report.slots_used,
        report.step,
    )
    if min(counts) < 0:
        return "a count is negative"
    if not math.isfinite(report.step_s) or report.step_s < 0:
        return f"a step of {report.step_s} s"
    if rank.role is not Role.ENCODER:
        if report.kv_tokens > rank.rows * rank.block_tokens:
            return f"{report.kv_tokens} KV tokens where {rank.rows * rank.block_tokens} fit"
        waiting = report.queued_requests + report.running_requests
        if report.queued_tokens > max(1, waiting) * rank.context_tokens:
            return f"{report.queued_tokens} tokens wait in {waiting} requests"
    elif report.queued_tokens > MOST_IMAGE_TOKENS:
        return f"{report.queued_tokens} image tokens wait"
    if rank.slots and report.slots_used > rank.slots:
        return f"{report.slots_used} slots in use of {rank.slots}"
    slots = rank.slots or MOST_REQUESTS
    if max(report.running_requests, report.reserved_requests) > slots:
        return f"{report.running_requests} requests run, {report.reserved_requests} are promised room, of {slots}"
    # Preempted requests wait, too, in a queue that takes nobody else.
    most = rank.queue_requests + slots if rank.queue_requests else MOST_REQUESTS
    if report.queued_requests > most:
        return f"{report.queued_requests} requests wait where {most} may"
    if report.step > MOST_STEPS:
        return f"step {report.step}"
    return None


def leaps(step: int, since: int, seconds: float) -> bool:
    """Whether a rank that was at step `since` so many seconds ago cannot be at `step` yet."""
    return step - since > SPARE_STEPS + STEPS_PER_S * max(0.0, seconds)
