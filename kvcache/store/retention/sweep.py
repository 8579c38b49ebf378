"""When the sweeper may act (spec/kv_tier.md, Recovery).

A sweeper that trusts a wrong clock unlinks what is alive. So it does nothing while the wall clock differs from that of
the server that hosts share (Redis, which has one to ask; etcd has none) by over 60 s, or has jumped against the
monotonic clock since the last look.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SKEW_S = 60.0
"""Between the wall clock and the shared one; also the largest jump against the monotonic clock."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """All clocks, read together."""

    wall: float
    monotonic: float
    shared: float | None
    """The wall clock of the shared index's server; None where the store is this host's alone."""


class ClockGuard:
    """Says at each pass whether time can be trusted. The first reading is trusted as far as the shared clock agrees."""

    def __init__(self, max_skew_s: float = MAX_SKEW_S) -> None:
        self._max_skew_s = max_skew_s
        self._last: ClockReading | None = None

    def refusal(self, reading: ClockReading) -> str:
        """Empty if the clocks agree, else why the sweeper must do nothing in this pass.

        After a jump that the shared clock does not contradict the new time counts from the next pass on, unless it
        jumps again: a host that was suspended goes on; one pass is lost.
        """
        last, self._last = self._last, reading
        if reading.shared is not None and abs(reading.wall - reading.shared) > self._max_skew_s:
            return (
                f"the wall clock is {reading.wall - reading.shared:+.0f} s off the index server's (at most "
                f"{self._max_skew_s:.0f} s); set this host's clock"
            )
        if last is not None:
            jump = (reading.wall - last.wall) - (reading.monotonic - last.monotonic)
            if abs(jump) > self._max_skew_s:
                return f"the wall clock jumped by {jump:+.0f} s against the monotonic clock since the last pass"
        return ""
