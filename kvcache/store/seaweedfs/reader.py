"""Read one record from whichever copy has it whole.

Copies are asked one after the other, servers that answered last first. Every copy is verified by itself: a spoilt one
is as good as an absent one while another is whole (L3). What no copy gave is one miss, with the cause that weighs most.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from headrace.kvcache.entries import Loaded, Miss
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.store.seaweedfs.cluster import Cluster, ClusterError, Location, VolumeUnknown
from headrace.kvcache.store.seaweedfs.http import Servers, ServerTimeout, ServerUnreachable
from headrace.kvcache.store.seaweedfs.needles import Needle, needle_of, verified
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.segments.record import HEADER_BYTES, Header, read_header

_WEIGHT = (
    Miss.DIGEST,
    Miss.HEADER,
    Miss.SHORT,
    Miss.TIMEOUT,
    Miss.SERVER,
    Miss.NOT_CONNECTED,
    Miss.ABSENT,
)
"""Of several copies' causes the first here is told: damage before trouble, trouble before absence."""
_CAUSES = {"timeout": Miss.TIMEOUT, "server": Miss.SERVER}


@dataclass(frozen=True, slots=True)
class ReadResult:
    """One read."""

    result: Loaded | Miss
    gone: bool
    """As many copies as were written answered that there is no such needle: the row points to nothing. A volume that
    no server has proves nothing, since its servers may all come back."""
    spoilt: bool
    """A copy was there and is not what was written."""


class RecordReader:
    """Thread-safe."""

    def __init__(self, settings: SeaweedSettings, servers: Servers, cluster: Cluster) -> None:
        self._settings = settings
        self._servers = servers
        self._cluster = cluster

    def read(self, row: IndexRow, deadline: float) -> ReadResult:
        """The verified payload of a row's record, or why not."""
        needle = needle_of(row)
        if needle is None:
            return ReadResult(Miss.HEADER, gone=True, spoilt=False)
        causes: list[Miss] = []
        tried: set[str] = set()
        spoilt = False
        for fresh in (False, True):
            try:
                locations = self._cluster.locations(needle.volume, deadline, fresh=fresh)
            except VolumeUnknown:
                causes.append(Miss.NOT_CONNECTED)
                continue
            except ClusterError as error:
                causes.append(_CAUSES.get(error.cause, Miss.NOT_CONNECTED))
                break
            untried = [location for location in self._in_order(locations, needle) if location.server not in tried]
            for place, location in enumerate(untried):
                tried.add(location.server)
                last = place == len(untried) - 1
                found = self._ask(location, row, needle, self._patience(deadline, last))
                if isinstance(found, Loaded):
                    return ReadResult(found, gone=False, spoilt=spoilt)
                spoilt = spoilt or found in (Miss.DIGEST, Miss.HEADER, Miss.SHORT)
                causes.append(found)
            if all(cause is Miss.ABSENT for cause in causes) or time.monotonic() >= deadline:
                break
        gone = causes.count(Miss.ABSENT) == len(causes) >= self._settings.copies
        return ReadResult(_heaviest(causes), gone=gone, spoilt=spoilt)

    def header(self, row: IndexRow, deadline: float) -> Header | None:
        """The header of a row's record, from any copy; None if none gives it."""
        needle = needle_of(row)
        if needle is None:
            return None
        try:
            for location in self._in_order(self._cluster.locations(needle.volume, deadline), needle):
                with contextlib.suppress(ServerTimeout, ServerUnreachable):
                    reply = self._servers.call("GET", location.server, needle.path, deadline, head=HEADER_BYTES)
                    header = read_header(memoryview(reply.body)) if reply.status == 206 else None
                    if header is not None and header.info.key == row.key:
                        return header
        except ClusterError:
            return None
        return None

    def _ask(self, location: Location, row: IndexRow, needle: Needle, deadline: float) -> Loaded | Miss:
        try:
            reply = self._servers.call("GET", location.server, needle.path, deadline)
        except ServerTimeout:
            return Miss.TIMEOUT
        except ServerUnreachable:
            return Miss.NOT_CONNECTED
        if reply.status == 200:
            return verified(reply.body, row, needle, self._settings.collection)
        return Miss.ABSENT if reply.status == 404 else Miss.SERVER

    def _patience(self, deadline: float, last: bool) -> float:
        """A copy that is not the last one gets its share of the time only."""
        return deadline if last else min(deadline, time.monotonic() + self._settings.read_attempt_s)

    def _in_order(self, locations: tuple[Location, ...], needle: Needle) -> list[Location]:
        """Servers that are up first; among equals each needle has its own first copy, so that load spreads."""
        shift = needle.number % len(locations)
        turned = locations[shift:] + locations[:shift]
        return sorted(turned, key=lambda location: not self._servers.up(location.server))


def _heaviest(causes: list[Miss]) -> Miss:
    return min(causes, key=_WEIGHT.index, default=Miss.ABSENT)
