"""Entries for store tests: chains of blocks with a snapshot at their end."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence

from headrace.kvcache.entries import EntryInfo, EntryKind, GetResult, Loaded, Miss, RetentionClass, payload_digest
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import PutEntry

NAMESPACE = hashlib.sha256(b"namespace of tests").digest()
OTHER_NAMESPACE = hashlib.sha256(b"another namespace").digest()
TENANT = b"tenant of tests."
OTHER_TENANT = b"another tenant.."
BLOCK_TOKENS = 128


def key_of(*parts: object) -> Key:
    return hashlib.sha256(repr(parts).encode()).digest()


class Payload(bytes):
    """Bytes that a failed assertion shows by their key, length and digest: thousands of lists of payloads are compared,
    and megabytes of differing bytes would hide which test it was. Equal to any bytes of the same content."""

    key: Key

    @classmethod
    def of(cls, key: Key, content: bytes | memoryview) -> Payload:
        payload = cls(content)
        payload.key = key
        return payload

    def __repr__(self) -> str:
        return f"<{self.key.hex()[:8]}: {len(self):,} B, xxh3 {payload_digest(self).hex()[:8]}>"


def payload_of(key: Key, length: int) -> Payload:
    """Bytes that only this key has."""
    return Payload.of(key, random.Random(key).randbytes(length))


def block(
    chain: str,
    number: int,
    *,
    length: int = 5_000,
    kind: EntryKind = EntryKind.BLOCK,
    namespace: bytes = NAMESPACE,
    tenant: bytes = TENANT,
    retention: RetentionClass = RetentionClass.CHAT,
) -> PutEntry:
    """Entry `number` of a chain; blocks of a chain are each other's parents."""
    key = key_of(chain, number, kind)
    payload = payload_of(key, length)
    parent = key_of(chain, number - (kind is EntryKind.BLOCK), EntryKind.BLOCK)
    tokens = (number + 1) * BLOCK_TOKENS
    return PutEntry(
        EntryInfo(key, kind, namespace, parent, tokens, length, payload_digest(payload), retention, tenant), payload
    )


def prefix(
    chain: str,
    blocks: int,
    *,
    length: int = 5_000,
    snapshot: int = 20_000,
    namespace: bytes = NAMESPACE,
    tenant: bytes = TENANT,
    retention: RetentionClass = RetentionClass.CHAT,
) -> list[PutEntry]:
    """Blocks 0 … blocks - 1 and the snapshot at their end (none if `snapshot` is 0)."""
    out = [
        block(chain, number, length=length, namespace=namespace, tenant=tenant, retention=retention)
        for number in range(blocks)
    ]
    if snapshot:
        out.append(
            block(
                chain,
                blocks - 1,
                length=snapshot,
                kind=EntryKind.SNAPSHOT,
                namespace=namespace,
                tenant=tenant,
                retention=retention,
            )
        )
    return out


def keys(entries: Sequence[PutEntry]) -> list[Key]:
    return [entry.info.key for entry in entries]


def soon(seconds: float = 60.0) -> float:
    """A deadline that a test does not mean to meet."""
    return time.monotonic() + seconds


def consume(results: Sequence[GetResult]) -> list[Payload | Miss]:
    """Payloads under the keys that came with them, and misses; every buffer is given back."""
    out: list[Payload | Miss] = []
    for result in results:
        if isinstance(result, Loaded):
            out.append(Payload.of(result.info.key, result.payload))
            result.release()
        else:
            out.append(result)
    return out


class FakeWall:
    """A wall clock that a test sets."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
