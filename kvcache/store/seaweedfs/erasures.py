"""What was erased for privacy, kept where a rebuild finds it.

Deleting needles is not enough: a server that was away during the deletion comes back with them. So each erasure is a
small record without expiry in a collection of its own, written before anything is deleted, and every scan leaves out
what an erasure covers: records of that tenant or namespace with a sequence (time of writing) up to the erasure's.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.kvcache.entries import EntryInfo
from headrace.kvcache.store.segments.names import ROOT

_MAGIC = b"HRERASED"
_FIELDS = struct.Struct("<8sHBxI32sQ")
_CRC = struct.Struct("<I")
ERASURE_BYTES = _FIELDS.size + _CRC.size
_VERSION = 1
_TENANT, _NAMESPACE = 1, 2
ERASED_AHEAD_NS = 60 * 10**9
"""An erasure holds this far beyond the orderer's clock: so much may other writers' clocks be ahead of it. What the
tenant writes anew within that time may be erased too."""


@dataclass(frozen=True, slots=True)
class Erasure:
    """One order to erase; exactly one of the two is set."""

    until: int
    """Sequence of records (time of writing in nanoseconds) up to which it holds."""
    tenant_tag: bytes = b""
    namespace: bytes = b""

    def covers(self, info: EntryInfo, sequence: int) -> bool:
        """Whether a record must never be found again."""
        if sequence > self.until:
            return False
        return info.tenant_tag == self.tenant_tag if self.tenant_tag else info.namespace == self.namespace

    def may_cover(self, tenant_tag: bytes, group: str) -> bool:
        """The same as far as an index row tells: its tenant, and its group, which begins with the namespace."""
        if self.tenant_tag:
            return tenant_tag == self.tenant_tag
        return group.startswith(f"{ROOT}/{self.namespace.hex()}/")

    def pack(self) -> bytes:
        kind, name = (_TENANT, self.tenant_tag) if self.tenant_tag else (_NAMESPACE, self.namespace)
        fields = _FIELDS.pack(_MAGIC, _VERSION, kind, len(name), name, self.until)
        return fields + _CRC.pack(zlib.crc32(fields))

    @staticmethod
    def unpack(data: bytes | memoryview) -> Erasure | None:
        """The erasure at the start of `data`, or None if there is no whole one."""
        if len(data) < ERASURE_BYTES:
            return None
        magic, version, kind, size, name, until = _FIELDS.unpack_from(data)
        (crc,) = _CRC.unpack_from(data, _FIELDS.size)
        if magic != _MAGIC or version != _VERSION or crc != zlib.crc32(bytes(data[: _FIELDS.size])):
            return None
        if kind == _TENANT:
            return Erasure(until, tenant_tag=name[:size])
        return Erasure(until, namespace=name[:size]) if kind == _NAMESPACE else None


def covered(erasures: Iterable[Erasure], info: EntryInfo, sequence: int) -> bool:
    return any(erasure.covers(info, sequence) for erasure in erasures)
