"""Requests with ids of prefix blocks, in time that can be stretched and copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.router.simulate.traces import TraceFormat, read_trace

BLOCK_TOKENS = 512
"""Tokens of one hash id of these traces."""


@dataclass(frozen=True, slots=True)
class Request:
    time_s: float
    blocks: tuple[int, ...]
    """Ids of its prefix blocks in order, the last partial one included; equal ids are equal blocks."""


@dataclass(frozen=True)
class Trace:
    """Requests in the order of the file."""

    requests: Sequence[Request]
    unique: int
    """Distinct blocks."""
    accesses: int
    """Blocks over all requests."""

    @staticmethod
    def of(requests: Sequence[Request]) -> Trace:
        return Trace(requests, len({b for r in requests for b in r.blocks}), sum(len(r.blocks) for r in requests))

    @property
    def span_s(self) -> float:
        return self.requests[-1].time_s - self.requests[0].time_s if self.requests else 0.0

    def stretched(self, span_s: float) -> Trace:
        """The same requests evenly slowed, so that the last comes `span_s` after the first, which comes at 0."""
        if not self.requests or self.span_s <= 0:
            raise ValueError("a trace of no duration cannot be stretched")
        start, factor = self.requests[0].time_s, span_s / self.span_s
        return Trace(
            [Request((r.time_s - start) * factor, r.blocks) for r in self.requests], self.unique, self.accesses
        )

    def copies(self, count: int, apart_s: float) -> Iterator[Request]:
        """The trace `count` times, each later by `apart_s` and with ids of its own."""
        stride = 1 + max(block for request in self.requests for block in request.blocks)
        for copy in range(count):
            for request in self.requests:
                blocks = tuple(block + copy * stride for block in request.blocks)
                yield Request(request.time_s + copy * apart_s, blocks)


def load_trace(path: Path) -> Trace:
    """A file in Mooncake's format. Raises TraceError."""
    rows = read_trace(path, TraceFormat.MOONCAKE).rows
    return Trace.of([Request(row.at_s, row.blocks) for row in rows])
