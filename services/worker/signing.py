"""Signed transfer parameters: handles, agents and embedding handles that this cluster made, and nobody else (L25).

HMAC-SHA256 under a key derived from the cluster's secret, over the canonical fields of one message: a domain, then
every field behind its length (LE64), numbers as LE64. A signature is bound to the process life, the request, the
attempt, the rows and, for a handle, the time until which a sender may begin to write. It says that a worker of the
cluster made the message; whether it is the right one for this request is compared besides (L1).
"""

from __future__ import annotations

import hmac
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from headrace.services.runtime import logs
from headrace.services.runtime.errors import FailedPrecondition, PermissionDenied
from headrace.services.runtime.files import Stamp, stamp_of
from headrace.services.runtime.settings_load import SettingsError
from headrace.v1 import common_pb2, encoder_pb2

MIN_SECRET_CHARACTERS: Final = 32
SKEW_S: Final = 60.0
"""How far apart the clocks of two hosts may be: a handle is good for so long beyond its deadline."""
RELOAD_S: Final = 1.0
_ALL_ONES: Final = (1 << 64) - 1
"""Numbers are signed in two's complement: an enum from the wire may be negative."""
_ABSENT: Final = _ALL_ONES
_log = logs.get(__name__)


class Signer:
    """Signs and checks. Without secrets it does neither: a cluster on loopback that nobody gave one."""

    def __init__(
        self,
        secrets: tuple[str, ...] = (),
        *,
        file: Path | None = None,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """The first secret signs, all of them are believed. `file` holds one a line and is followed.

        Raises SettingsError for a file that cannot be read, or a secret that is too short."""
        self._file = file
        self._wall = wall
        self._monotonic = monotonic
        self._looked = monotonic()
        self._stamp: Stamp | None = None
        self._keys = tuple(derive(secret) for secret in secrets)
        if file is not None:
            self._read(file)

    @property
    def signs(self) -> bool:
        """There is a secret."""
        return bool(self._current())

    # --- signing -------------------------------------------------------------------------------------------------

    def handle(self, wire: common_pb2.TransferHandle) -> common_pb2.TransferHandle:
        """Sign a grant, which its time_left_ms bounds. Returns the same message."""
        keys = self._current()
        if keys:
            wire.expires_unix_ms = round((self._wall() + SKEW_S) * 1000) + wire.time_left_ms
            wire.signature = _mac(keys[0], _handle_fields(wire))
        return wire

    def agent(self, wire: common_pb2.TransferAgent) -> common_pb2.TransferAgent:
        """Sign the way to a process's memory. Returns the same message."""
        keys = self._current()
        if keys:
            wire.signature = _mac(keys[0], _agent_fields(wire))
        return wire

    def embedding(self, wire: encoder_pb2.EmbeddingHandle) -> encoder_pb2.EmbeddingHandle:
        """Sign the right to an embedding. Returns the same message."""
        keys = self._current()
        if keys:
            wire.signature = _mac(keys[0], _embedding_fields(wire))
        return wire

    # --- checking ------------------------------------------------------------------------------------------------

    def check_handle(self, wire: common_pb2.TransferHandle, field: str, *, fresh: bool) -> None:
        """`fresh`: its time must not be over, as something is to be written by it. Its receiver's own books decide of
        what has been written.

        Raises PermissionDenied for a forged or altered one, FailedPrecondition for a stale one."""
        if not self._check(_handle_fields, wire, wire.signature, field):
            return
        if fresh and self._wall() * 1000 > wire.expires_unix_ms:
            raise FailedPrecondition("the time of this transfer handle is over; reserve again", field=field)

    def check_agent(self, wire: common_pb2.TransferAgent, field: str) -> None:
        """Raises PermissionDenied for a forged or altered one."""
        self._check(_agent_fields, wire, wire.signature, field)

    def check_embedding(self, wire: encoder_pb2.EmbeddingHandle, field: str) -> None:
        """Raises PermissionDenied for a forged or altered one; its encoder's lease says whether it is stale."""
        self._check(_embedding_fields, wire, wire.signature, field)

    # --- inside --------------------------------------------------------------------------------------------------

    def _check(self, fields: Callable[..., Iterator[bytes | int]], wire: object, signature: bytes, field: str) -> bool:
        """Whether there was something to check."""
        keys = self._current()
        if not keys:
            return False
        for key in keys:
            if hmac.compare_digest(_mac(key, fields(wire)), signature):
                return True
        raise PermissionDenied("this was not signed by the cluster, or was changed since; discard it", field=field)

    def _current(self) -> tuple[bytes, ...]:
        now = self._monotonic()
        if self._file is not None and now - self._looked >= RELOAD_S:
            self._looked = now
            try:
                self._read(self._file)
            except SettingsError as error:
                _log.warning("the former secrets stay in force", error=str(error))
        return self._keys

    def _read(self, file: Path) -> None:
        try:
            stamp = stamp_of(file)
            if stamp == self._stamp:
                return
            lines = file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"transfer.secret_file: cannot read {file}: {error}") from error
        if not lines or any(len(line) < MIN_SECRET_CHARACTERS for line in lines):
            raise SettingsError(
                f"transfer.secret_file: {file} needs one secret a line, each of {MIN_SECRET_CHARACTERS} characters or "
                "more (openssl rand -hex 32)"
            )
        self._stamp, self._keys = stamp, tuple(derive(line) for line in lines)


UNSIGNED: Final = Signer()
"""Signs nothing and believes everything."""


def derive(secret: str) -> bytes:
    """HKDF-SHA256 (RFC 5869) of the cluster's secret, for transfers alone: 32 bytes."""
    extracted = hmac.digest(b"headrace.cluster.1", secret.encode(), "sha256")
    return hmac.digest(extracted, b"headrace.transfer.1" + b"\x01", "sha256")


def _mac(key: bytes, fields: Iterator[bytes | int]) -> bytes:
    parts: list[bytes] = []
    for field in fields:
        data = (field & _ALL_ONES).to_bytes(8, "little") if isinstance(field, int) else field
        parts += (len(data).to_bytes(8, "little"), data)
    return hmac.digest(key, b"".join(parts), "sha256")


def _numbers(values: Iterable[int]) -> bytes:
    return array("Q", [value & _ALL_ONES for value in values]).tobytes()


def _peer(peer: common_pb2.PeerId) -> tuple[bytes, bytes]:
    return peer.replica_id.encode(), peer.incarnation.encode()


def _handle_fields(wire: common_pb2.TransferHandle) -> Iterator[bytes | int]:
    """Everything but time_left_ms, which counts down on the way, and the signature."""
    yield b"headrace.handle.1"
    yield wire.transfer_id.encode()
    yield from _peer(wire.receiver)
    yield wire.rank
    yield wire.id.request_id.encode()
    yield from (wire.id.attempt, wire.generation)
    yield from (wire.layout_fingerprint, wire.model_fingerprint)
    yield from (wire.payload, wire.row_bytes, wire.slot_bytes, wire.checksum, wire.metadata_version)
    yield from (wire.expires_unix_ms, len(wire.parts))
    for part in wire.parts:
        yield part.choice if part.HasField("choice") else _ABSENT
        yield _numbers(part.blocks)
        yield _numbers(part.rows)
        yield part.slot if part.HasField("slot") else _ABSENT


def _agent_fields(wire: common_pb2.TransferAgent) -> Iterator[bytes | int]:
    yield b"headrace.agent.1"
    yield from _peer(wire.owner)
    yield wire.rank
    yield wire.agent_name.encode()
    yield wire.agent_metadata
    yield wire.metadata_version
    yield wire.listener.encode()
    yield len(wire.regions)
    for region in wire.regions:
        yield from (region.payload, int(region.slots), region.base_address, region.item_bytes, region.items)
        yield from (region.memory, region.device_id, region.use)
    yield wire.model.name.encode()
    yield from (wire.model.model_fingerprint, wire.model.layout_fingerprint, wire.model.row_fingerprint)
    yield _numbers(wire.checksums)


def _embedding_fields(wire: encoder_pb2.EmbeddingHandle) -> Iterator[bytes | int]:
    yield b"headrace.embedding.1"
    yield from _peer(wire.owner)
    yield wire.endpoint.encode()
    yield wire.id.request_id.encode()
    yield wire.id.attempt
    yield wire.lease_id.encode()
    yield wire.model_fingerprint
    yield from (wire.rows, wire.row_bytes)
    yield wire.dtype.encode()
