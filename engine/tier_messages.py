"""What the cache tier says to the engine thread, and what the engine gives it to keep (spec/kv_tier.md).

Loading, before a request is queued:

    BeginLoad → Wanted       what the prompt's prefix is, and what of it this pool has (held for the load)
    Adopt     → int          verified payloads, copied into rows and snapshot places under their keys
    EndLoad                  the request will not come; else its own way ends the load

Writing, as blocks get their names: TierWrite (kvcache/tier/types.py) goes to the sink that Engine was given, TierUnpin
comes back when the copy is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.messages import Command
from headrace.engine.request import EngineRequest, RequestKey
from headrace.kvcache.entries import EntryKind, RetentionClass
from headrace.kvcache.keys import Key
from headrace.kvcache.tier.plan import Wanted
from headrace.kvcache.tier.types import CacheScope, TierSink, TierWrite, WriteRow

__all__ = [
    "Adopt",
    "Adoption",
    "BeginLoad",
    "CacheScope",
    "EndLoad",
    "OfferPrefix",
    "TierSink",
    "TierUnpin",
    "TierWrite",
    "WriteRow",
]


@dataclass(frozen=True)
class BeginLoad(Command[Wanted]):
    """Hold what the pool has of a request's prefix until the request is admitted, ends, or is late (L6).

    Refused like the request itself would be (INVALID_ARGUMENT), ABORTED when this attempt has a load or lives already.
    Loads of lower attempts end.
    """

    request: EngineRequest


@dataclass(frozen=True)
class Adoption:
    """One verified entry. A snapshot's key is its own (keys.snapshot_key), not its block's."""

    key: Key
    kind: EntryKind
    payload: bytes | memoryview = field(repr=False)


@dataclass(frozen=True)
class Adopt(Command[int]):
    """Copy entries into the pool, prefix first; answers how many leading ones are there now (fewer: the load's share of
    the pool is used up). NOT_FOUND when the load is over. The payloads may be released when the answer is there."""

    key: RequestKey
    entries: tuple[Adoption, ...]


@dataclass(frozen=True)
class EndLoad(Command[None]):
    """Nothing more comes and the request will not either; what was adopted stays cached. Unknown keys are no error."""

    key: RequestKey


@dataclass(frozen=True)
class OfferPrefix(Command[int]):
    """Offer entries of a prefix that is in use here and that the store turned out to lack: computed for BATCH traffic,
    dropped when it was computed, or expired since. Answers how many were still in the pool and found room among the
    pins; the rest is left for the next use."""

    scope: CacheScope
    retention: RetentionClass
    blocks: tuple[tuple[Key, Key, int], ...]
    """Key, parent key, end position; prefix order."""
    snapshots: tuple[tuple[Key, Key, int], ...] = ()
    """Key, key of its block, position."""


@dataclass(frozen=True)
class TierUnpin(Command[None]):
    """The copies are made (or given up). NOT_FOUND for a pin that is not held."""

    pins: tuple[str, ...]
