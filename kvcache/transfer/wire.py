"""Bytes of our own that ride on the wire's opaque fields: the terminal notice and the agent's envelope.

A notice rides on a NIXL notification; the envelope is the opaque ``agent_metadata`` of a peer's description. Both are
versioned, length-prefixed and refused unless every byte is accounted for (L1: truncated is not the same).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.kvcache.transfer.base import PeerDescription
from headrace.kvcache.transfer.peers import ProcessIdentity
from headrace.kvcache.transfer.pushes import Outcome, TerminalNotice

_NOTICE = b"HRN1"
_ENVELOPE = b"HRE1"
_OUTCOMES = {Outcome.OK: b"\x01", Outcome.FAILED: b"\x02"}
_FROM_WIRE = {value: key for key, value in _OUTCOMES.items()}


class MalformedBytes(ValueError):
    """Not the bytes that this version writes: another version, truncated, or not ours."""


def pack(magic: bytes, fields: Sequence[bytes]) -> bytes:
    """magic, then each field behind its length as LE32."""
    return magic + b"".join(struct.pack("<I", len(field)) + field for field in fields)


def unpack(magic: bytes, data: bytes, count: int | None = None) -> list[bytes]:
    """Inverse of pack. Raises MalformedBytes unless data is whole fields, ``count`` of them where it is given."""
    if data[:4] != magic:
        raise MalformedBytes(f"expected {magic!r}, found {data[:4]!r}")
    fields: list[bytes] = []
    offset = 4
    while offset < len(data):
        if offset + 4 > len(data):
            raise MalformedBytes(f"truncated after {offset} bytes")
        (length,) = struct.unpack_from("<I", data, offset)
        offset += 4
        if offset + length > len(data):
            raise MalformedBytes(f"field of {length} bytes is truncated")
        fields.append(data[offset : offset + length])
        offset += length
    if count is not None and len(fields) != count:
        raise MalformedBytes(f"{len(fields)} fields where {count} were expected")
    return fields


def encode_notice(notice: TerminalNotice) -> bytes:
    numbers = struct.pack("<IQQ", notice.attempt, notice.generation, notice.nbytes)
    return pack(_NOTICE, [notice.transfer_id.encode(), notice.request_id.encode(), numbers, _OUTCOMES[notice.outcome]])


def decode_notice(data: bytes, sender: str) -> TerminalNotice:
    """Raises MalformedBytes."""
    transfer_id, request_id, numbers, outcome = unpack(_NOTICE, data, 4)
    if len(numbers) != 20 or outcome not in _FROM_WIRE:
        raise MalformedBytes("notice with impossible fields")
    attempt, generation, nbytes = struct.unpack("<IQQ", numbers)
    try:
        return TerminalNotice(
            transfer_id=transfer_id.decode(),
            request_id=request_id.decode(),
            attempt=attempt,
            generation=generation,
            outcome=_FROM_WIRE[outcome],
            nbytes=nbytes,
            sender=sender,
        )
    except UnicodeDecodeError as error:
        raise MalformedBytes("notice with ids that are not UTF-8") from error


@dataclass(frozen=True)
class Envelope:
    """What a peer needs beyond the description's typed fields."""

    connection: bytes
    """The wire's own metadata: addresses, memory keys of the landing regions and probe pages."""
    process: ProcessIdentity
    versions: tuple[int, ...]
    """Version of each landing region, in the order of the description's regions."""
    probes: tuple[tuple[str, int, int], ...]
    """(memory, address, device id) of pages of PROBE_BYTES that a peer writes to learn which wire is taken."""


def encode_envelope(envelope: Envelope) -> bytes:
    probes = [pack(b"PRB1", [kind.encode(), struct.pack("<QI", *where)]) for kind, *where in envelope.probes]
    versions = struct.pack(f"<{len(envelope.versions)}Q", *envelope.versions)
    return pack(_ENVELOPE, [envelope.connection, envelope.process.encode(), versions, pack(b"PRBS", probes)])


def process_of(peer: PeerDescription) -> ProcessIdentity:
    """The process behind a description; its ``liveness`` is the evidence that frees quarantined rows (L6).

    Raises MalformedBytes.
    """
    return decode_envelope(peer.agent_metadata).process


def decode_envelope(data: bytes) -> Envelope:
    """Raises MalformedBytes."""
    connection, process, versions, pages = unpack(_ENVELOPE, data, 4)
    if len(versions) % 8:
        raise MalformedBytes("region versions are truncated")
    probes: list[tuple[str, int, int]] = []
    for page in unpack(b"PRBS", pages):
        kind, where = unpack(b"PRB1", page, 2)
        if len(where) != 12:
            raise MalformedBytes("probe page with impossible fields")
        address, device = struct.unpack("<QI", where)
        probes.append((kind.decode("ascii", "replace"), address, device))
    try:
        identity = ProcessIdentity.decode(process)
    except ValueError as error:
        raise MalformedBytes(str(error)) from error
    return Envelope(connection, identity, struct.unpack(f"<{len(versions) // 8}Q", versions), tuple(probes))
