"""The landing region of a decode rank over rebuilds: grants come from the newest, older ones serve their last waits.

A region with too much quarantine is replaced, not repaired: posted writes land even after deregistration, so its memory
stays until every transfer of it is terminal (spec/protocol.md, "Remote writes cannot be recalled").
"""

from __future__ import annotations

from headrace.kvcache.handle import Handle
from headrace.kvcache.landing import LandingRegion
from headrace.kvcache.landing_types import NoticeResult


class Landings:
    """The newest region, and its predecessors until they have drained. Used by the engine thread."""

    def __init__(self, landing: LandingRegion) -> None:
        self.newest = landing
        self._older: list[LandingRegion] = []

    @property
    def regions(self) -> tuple[LandingRegion, ...]:
        return (self.newest, *self._older)

    def of(self, handle: Handle) -> LandingRegion:
        """The region that granted a handle; the newest for one that nobody granted, which then refuses it."""
        return next((region for region in self._older if region.version == handle.metadata_version), self.newest)

    def notice(self, transfer_id: str, *, complete: bool) -> NoticeResult:
        """A terminal notice, for whichever region the transfer is of."""
        region = next((region for region in self._older if region.state(transfer_id) is not None), self.newest)
        return region.notice(transfer_id, complete=complete)

    def abort(self, request_id: str, attempt: int) -> None:
        for region in self.regions:
            region.abort(request_id, attempt)

    def sender_died(self, incarnation: str) -> tuple[Handle, ...]:
        return tuple(handle for region in self.regions for handle in region.sender_died(incarnation))

    def quarantined(self) -> tuple[tuple[Handle, str | None], ...]:
        """Grants of all regions that wait for their sender's last word, and the senders."""
        return tuple(found for region in self.regions for found in region.quarantined())

    def rebuild(self) -> LandingRegion:
        """A fresh region for new grants. Waits under way end in the old one."""
        self._older.append(self.newest)
        self.newest = self.newest.rebuild()
        return self.newest

    def take_drained(self) -> tuple[LandingRegion, ...]:
        """Predecessors that nobody can write any more; their memory may go."""
        drained = tuple(region for region in self._older if region.drained)
        self._older = [region for region in self._older if not region.drained]
        return drained

    def problems(self) -> tuple[str, ...]:
        return tuple(problem for region in self.regions for problem in region.integrity().problems)

    @property
    def idle(self) -> bool:
        return all(region.integrity().idle for region in self.regions)

    @property
    def quarantined_bytes(self) -> int:
        return sum(region.quarantined_bytes for region in self.regions)
