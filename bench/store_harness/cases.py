"""Sizes that are measured, and the entries of one round."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, replace

from headrace.kvcache.entries import EntryInfo, EntryKind, RetentionClass, payload_digest
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import PutEntry
from headrace.kvcache.store.segments.record import record_bytes

MIB = 1 << 20
NAMESPACE = hashlib.sha256(b"bench.store").digest()
TENANT = hashlib.sha256(b"tenant").digest()[:16]
_rounds = itertools.count()


@dataclass(frozen=True)
class Case:
    """Records of one size."""

    payload: int
    count: int

    @property
    def record(self) -> int:
        """Bytes of a whole record: header, payload, padding. What both sides of a ratio count."""
        return record_bytes(self.payload)

    @property
    def total(self) -> int:
        """Bytes of all records."""
        return self.record * self.count


def cases(total_bytes: int, payloads: tuple[int, ...]) -> list[Case]:
    """A case per payload, with about that many bytes each."""
    return [Case(payload, max(8, total_bytes // record_bytes(payload))) for payload in payloads]


def payload_pattern(length: int) -> bytes:
    """Bytes that no disk compresses away."""
    piece = hashlib.shake_256(b"bench.store").digest(MIB)
    return (piece * (length // MIB + 1))[:length]


def entries(case: Case, payload: bytes) -> list[PutEntry]:
    """A chain of blocks with keys of its own. The digest is known: whoever offers entries computed it."""
    number = next(_rounds)
    first = EntryInfo(
        key=_key(number, 0),
        kind=EntryKind.BLOCK,
        namespace=NAMESPACE,
        parent=bytes(32),
        tokens=128,
        length=case.payload,
        digest=payload_digest(payload),
        retention=RetentionClass.CHAT,
        tenant_tag=TENANT,
    )
    chain = [first]
    for place in range(1, case.count):
        chain.append(replace(first, key=_key(number, place), parent=chain[-1].key, tokens=128 * (place + 1)))
    return [PutEntry(info, payload) for info in chain]


def _key(number: int, place: int) -> Key:
    return hashlib.sha256(b"%d/%d" % (number, place)).digest()
