"""A life in seconds as a time to live of SeaweedFS: a count of 1 … 255 and a unit.

A needle dies when its own time to live has passed since it was appended, by its server's clock. An entry promises to
live until expires_at by our clock, and is appended later than expires_at was computed. So a time to live of at least
expires_at − now, plus what clocks may differ, never ends before expires_at; rounding up to a unit only adds.
"""

from __future__ import annotations

from headrace.kvcache.store.base import StoreError

CLOCK_SKEW_S = 300
"""What the clocks of writer and volume servers may differ. The sweeper does nothing beyond 60 s already."""
FOREVER = ""
"""The empty time to live: nothing expires."""
_UNITS = (("m", 60), ("h", 3_600), ("d", 86_400), ("w", 604_800))
_MOST = 255


def ttl_for(life_s: float) -> str:
    """The shortest time to live that ends no earlier than `life_s` seconds (> 0) from now, clock skew included."""
    if life_s <= 0:
        raise StoreError(f"a life of {life_s} s is none")
    wanted = life_s + CLOCK_SKEW_S
    for unit, seconds in _UNITS:
        count = int(-(-wanted // seconds))
        if count <= _MOST:
            return f"{count}{unit}"
    raise StoreError(f"a life of {life_s} s is longer than SeaweedFS counts; use the class without end")


def ttl_seconds(ttl: str) -> int:
    """Seconds of a time to live; 0 for FOREVER."""
    if ttl == FOREVER:
        return 0
    return int(ttl[:-1]) * dict(_UNITS)[ttl[-1]]
