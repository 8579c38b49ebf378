"""What is right: a payload is a function of its key, so that what a store returns is judged without its help."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from headrace.kvcache.entries import EntryInfo, EntryKind, GetResult, Loaded, RetentionClass, payload_digest
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import PutEntry

NAMESPACE = hashlib.sha256(b"namespace of the torture").digest()
BLOCK_TOKENS = 128
TENANTS = 3


def key_of(number: int) -> Key:
    return hashlib.sha256(b"torture" + number.to_bytes(8, "little")).digest()


def length_of(number: int, longest: int) -> int:
    """1 … longest bytes, most often no multiple of anything."""
    return 1 + int.from_bytes(hashlib.sha256(b"length" + number.to_bytes(8, "little")).digest()[:8], "little") % longest


def payload_of(key: Key, length: int) -> bytes:
    """Bytes that only this key has, and of which no two 512-byte pieces are equal."""
    return hashlib.shake_128(key).digest(length)


def tenant_of(number: int) -> bytes:
    return hashlib.sha256(b"tenant%d" % (number % TENANTS)).digest()[:16]


def entry(
    number: int, longest: int = 9_000, retention: RetentionClass = RetentionClass.CHAT, tenant: bytes | None = None
) -> PutEntry:
    """Block `number` of one long chain."""
    key, length = key_of(number), length_of(number, longest)
    payload = payload_of(key, length)
    info = EntryInfo(
        key=key,
        kind=EntryKind.BLOCK,
        namespace=NAMESPACE,
        parent=key_of(number - 1) if number else bytes(32),
        tokens=(number + 1) * BLOCK_TOKENS,
        length=length,
        digest=payload_digest(payload),
        retention=retention,
        tenant_tag=tenant_of(number) if tenant is None else tenant,
    )
    return PutEntry(info, payload)


class WrongBytes(AssertionError):
    """A store returned what was never written under that key: the one thing that must not happen."""


def judge(keys: Sequence[Key], results: Sequence[GetResult]) -> tuple[set[Key], int]:
    """The keys that came, right in every byte, and the number of misses; gives buffers back. Raises WrongBytes."""
    assert len(keys) == len(results)
    came: set[Key] = set()
    misses = 0
    for key, result in zip(keys, results, strict=True):
        if not isinstance(result, Loaded):
            misses += 1
            continue
        right = result.info.key == key and result.payload == payload_of(key, len(result.payload))
        right = right and len(result.payload) == result.info.length
        result.release()
        if not right:
            raise WrongBytes(key.hex())
        came.add(key)
    return came, misses


def numbers(keys: Iterable[Key], below: int) -> list[int]:
    """Which numbers those keys have, for messages."""
    wanted = set(keys)
    return [number for number in range(below) if key_of(number) in wanted]
