"""What the masters answer: file ids to write to, where a volume's copies are, which volumes there are."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from headrace.kvcache.store.seaweedfs.http import Reply, Servers, ServerTimeout, ServerUnreachable
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings

_ASK_AGAIN_S = 0.5
"""A failed read asks where the volume is now, but not more often than this."""
_COOKIE_HEX = 8
_UNITS = {1: "m", 2: "h", 3: "d", 4: "w", 5: "M", 6: "y"}
"""How SeaweedFS numbers the units of a time to live in its JSON."""


class ClusterError(Exception):
    """No master could do it; `cause` is a word for the statistics."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class VolumeUnknown(ClusterError):
    """The masters answered that there is no such volume: expired as a whole, dropped, or all its servers are away."""

    def __init__(self, volume: int) -> None:
        super().__init__("volume", f"no server has volume {volume}")


@dataclass(frozen=True, slots=True)
class Location:
    """One copy of a volume."""

    server: str
    """host:port of HTTP."""
    grpc: str
    """host:port of gRPC."""


@dataclass(frozen=True, slots=True)
class Grant:
    """File ids to write to: needles first … first + count − 1 of one volume, all with one cookie."""

    volume: int
    first: int
    cookie: int
    count: int
    server: str


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """One volume as the masters know it."""

    volume: int
    collection: str
    ttl: str
    nbytes: int
    """Of one copy, deleted needles included."""
    needles: int
    copies: int


@dataclass(slots=True)
class _Known:
    locations: tuple[Location, ...]
    asked_at: float


class Cluster:
    """Thread-safe. Answers about locations are cached, and kept as long as no master answers."""

    def __init__(self, settings: SeaweedSettings, servers: Servers) -> None:
        self._settings = settings
        self._servers = servers
        self._lock = threading.Lock()
        self._first_master = 0
        self._known: dict[int, _Known] = {}
        self._asking: dict[int, threading.Lock] = {}

    def assign(self, collection: str, ttl: str, count: int, deadline: float) -> Grant:
        """File ids for `count` needles. ClusterError: no master answers, or there is no room (cause `no_space`)."""
        query = {"collection": collection, "count": str(count), "replication": self._settings.replication}
        if ttl:
            query["ttl"] = ttl
        if self._settings.grow:
            query["writableVolumeCount"] = str(self._settings.grow)
        answer = self._ask(f"/dir/assign?{urlencode(query)}", deadline)
        if "fid" not in answer:
            raise ClusterError("no_space", f"SeaweedFS assigns no file id: {answer.get('error', answer)}")
        volume, _, needle = str(answer["fid"]).partition(",")
        granted = min(count, int(answer.get("count", 1)))
        cookie = int(needle[-_COOKIE_HEX:], 16)
        return Grant(int(volume), int(needle[:-_COOKIE_HEX], 16), cookie, granted, str(answer["url"]))

    def locations(self, volume: int, deadline: float, *, fresh: bool = False) -> tuple[Location, ...]:
        """The copies of a volume. `fresh`: what was known did not work. VolumeUnknown, ClusterError."""
        known = self._recent(volume, fresh)
        if known is not None:
            return known
        with self._lock:
            asking = self._asking.setdefault(volume, threading.Lock())
        if not asking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise ClusterError("timeout", f"volume {volume} was not found before the deadline")
        try:
            known = self._recent(volume, fresh)  # somebody else may have asked meanwhile
            return known if known is not None else self._look_up(volume, deadline)
        finally:
            asking.release()

    def volumes(self, deadline: float) -> Sequence[VolumeInfo]:
        """Every volume of this store's collections."""
        answer = self._ask("/vol/status", deadline)
        prefix = self._settings.collection + "_"
        found: dict[int, VolumeInfo] = {}
        for racks in answer.get("Volumes", {}).get("DataCenters", {}).values():
            for nodes in racks.values():
                for volumes in nodes.values():
                    for raw in volumes or ():
                        if not str(raw["Collection"]).startswith(prefix):
                            continue
                        seen = found.get(int(raw["Id"]))
                        found[int(raw["Id"])] = VolumeInfo(
                            volume=int(raw["Id"]),
                            collection=str(raw["Collection"]),
                            ttl=_ttl_of(raw.get("Ttl")),
                            nbytes=max(int(raw["Size"]), seen.nbytes if seen else 0),
                            needles=max(int(raw["FileCount"]), seen.needles if seen else 0),
                            copies=1 + (seen.copies if seen else 0),
                        )
        return [found[volume] for volume in sorted(found)]

    def delete_collection(self, collection: str, deadline: float) -> None:
        """Delete all volumes of a collection on every server that is up. No error if there is none."""
        self._ask(f"/col/delete?{urlencode({'collection': collection})}", deadline)

    def version(self, deadline: float) -> str:
        """Such as `8000GB 4.48`: which offsets index files have, and the release."""
        return str(self._ask("/dir/status", deadline).get("Version", ""))

    def _recent(self, volume: int, fresh: bool) -> tuple[Location, ...] | None:
        with self._lock:
            known = self._known.get(volume)
        believed = _ASK_AGAIN_S if fresh else self._settings.lookup_s
        if known is None or time.monotonic() - known.asked_at > believed:
            return None
        if not known.locations:
            raise VolumeUnknown(volume)
        return known.locations

    def _look_up(self, volume: int, deadline: float) -> tuple[Location, ...]:
        try:
            answer = self._ask(f"/dir/lookup?volumeId={volume}", deadline)
        except ClusterError:
            with self._lock:
                known = self._known.get(volume)
            if known is None or not known.locations:
                raise
            return known.locations  # volumes seldom move; a dead master is no reason to read nothing
        locations = tuple(
            Location(str(raw["url"]), f"{str(raw['url']).rpartition(':')[0]}:{int(raw['grpcPort'])}")
            for raw in answer.get("locations") or ()
        )
        with self._lock:
            self._known[volume] = _Known(locations, time.monotonic())
        if not locations:
            raise VolumeUnknown(volume)
        return locations

    def _ask(self, path: str, deadline: float) -> dict[str, Any]:
        """One question to the masters: the first answer that is no refusal (status from 500 on: a follower without a
        leader, no room), else the last refusal."""
        masters = self._settings.masters
        with self._lock:
            first = self._first_master
        failure, cause = "no master was asked", "not_connected"
        refusal: dict[str, Any] | None = None
        for which in ((first + step) % len(masters) for step in range(len(masters))):
            try:
                reply = self._servers.call("GET", masters[which], path, deadline)
            except ServerTimeout as error:
                failure, cause = str(error), "timeout"
                continue
            except ServerUnreachable as error:
                failure, cause = str(error), "not_connected"
                continue
            answer = _parsed(reply)
            if answer is None:
                failure, cause = f"master {masters[which]} answered {reply.status} to {path}", "server"
            elif reply.status >= 500:
                refusal = answer
            else:
                with self._lock:
                    self._first_master = which
                return answer
        if refusal is not None:
            return refusal
        raise ClusterError(cause, failure)


def _parsed(reply: Reply) -> dict[str, Any] | None:
    """The JSON object of a reply, {} of an empty one; None if it is none, or a bare error."""
    try:
        answer = json.loads(reply.body) if reply.body.strip() else {}
    except ValueError:
        return None
    if not isinstance(answer, dict) or (reply.status >= 500 and "error" not in answer):
        return None
    return answer


def _ttl_of(raw: object) -> str:
    if not isinstance(raw, dict) or not raw.get("Count"):
        return ""
    return f"{raw['Count']}{_UNITS.get(int(raw.get('Unit', 0)), '')}"
