"""Links between data centres: how long a request's KV takes to cross, behind what was sent before."""

from __future__ import annotations

from dataclasses import dataclass, field

GIGABIT = 125_000_000
ACCELERATORS = 8
BYTES_PER_S = 400 * GIGABIT
"""For each eight accelerators (spec/balancers.md)."""


@dataclass(slots=True)
class _Link:
    backlog: float = 0.0
    """Bytes that have not crossed yet."""
    at: float = 0.0


@dataclass(slots=True)
class Links:
    """Budgets by (from, to). What is charged drains at the link's rate."""

    bytes_per_s: float = BYTES_PER_S
    """Of eight accelerators."""
    delay_s: float = 0.005
    """Of one crossing, empty."""
    _links: dict[tuple[int, int], _Link] = field(default_factory=dict)

    def seconds(self, source: int, target: int, size: float, accelerators: int, now: float) -> float:
        """Until `size` bytes would have crossed. `accelerators`: of the smaller side."""
        rate = self._rate(accelerators)
        return self.delay_s + (self.backlog(source, target, accelerators, now) + size) / rate

    def charge(self, source: int, target: int, size: float, accelerators: int, now: float) -> None:
        """Those bytes are being sent."""
        left = self.backlog(source, target, accelerators, now)
        self._links[source, target] = _Link(left + size, now)

    def backlog(self, source: int, target: int, accelerators: int, now: float) -> float:
        """Bytes charged and not drained."""
        link = self._links.get((source, target))
        if link is None:
            return 0.0
        return max(0.0, link.backlog - self._rate(accelerators) * max(0.0, now - link.at))

    def _rate(self, accelerators: int) -> float:
        return self.bytes_per_s * max(1, accelerators) / ACCELERATORS
