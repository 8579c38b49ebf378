"""Streams that must not be taken: typed errors, and not a byte of them is written (L1, L25)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from headrace.kvcache.handle import Handle, LandingPart, PayloadKind
from headrace.services.runtime import peers
from headrace.services.runtime.errors import (
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    from_rpc_error,
)
from headrace.services.worker.signing import SKEW_S, Signer
from headrace.services.worker.transfer_wire import handle_to_wire
from headrace.v1 import transfer_pb2
from tests.services.worker._streams import PATIENCE_S, ROW, SIGNER, Pair, pair


def begin(one: Pair, handle: Handle, signer: Signer = SIGNER) -> transfer_pb2.WriteRequest:
    landing = handle_to_wire(handle, one.receiver.peer.replica_id, 30.0, signer)
    return transfer_pb2.WriteRequest(begin=transfer_pb2.WriteBegin(landing=landing, sender=one.sender.peer))


def rows(*pieces: transfer_pb2.RowPiece) -> transfer_pb2.WriteRequest:
    return transfer_pb2.WriteRequest(rows=transfer_pb2.WriteRows(pieces=pieces))


def piece(item: int, offset: int, count: int, *, slot: bool = False) -> transfer_pb2.RowPiece:
    return transfer_pb2.RowPiece(slot=slot, item=item, offset=offset, data=b"x" * count)


async def refused(one: Pair, *messages: transfer_pb2.WriteRequest, within: float | None = PATIENCE_S) -> HeadraceError:
    """The error that a stream of these messages gets."""
    async with one.sender.channels.use(one.receiver.server.address) as channel:
        call = one.stub(channel).Write(iter(messages), timeout=within)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    return from_rpc_error(caught.value)


async def test_handles_that_are_not_the_grant_write_nothing() -> None:
    """L1: forged, stale, crossed, of another life, request, attempt, generation or layout; and the grant lives on."""
    foreign = Signer(("f" * 32,))
    stale = Signer(("s" * 32,), wall=lambda: 1000.0 - SKEW_S)
    async with pair() as one:
        handle, other = one.grant("r", 2), one.grant("other", 2)
        changes: list[tuple[Handle, Signer, type[HeadraceError]]] = [
            (handle, foreign, PermissionDenied),
            (handle, stale, FailedPrecondition),
            (replace(handle, incarnation="a" * 32), SIGNER, FailedPrecondition),
            (replace(handle, transfer_id="unknown"), SIGNER, NotFound),
            (replace(handle, parts=other.parts), SIGNER, FailedPrecondition),
            (replace(handle, parts=(LandingPart(None, (0,), (15,), None),)), SIGNER, FailedPrecondition),
            (replace(handle, transfer_id=other.transfer_id), SIGNER, FailedPrecondition),
            (replace(handle, attempt=2), SIGNER, FailedPrecondition),
            (replace(handle, request_id="another"), SIGNER, FailedPrecondition),
            (replace(handle, generation=handle.generation + 1), SIGNER, FailedPrecondition),
            (replace(handle, layout_fingerprint=b"x" * 32), SIGNER, FailedPrecondition),
            (replace(handle, payload=PayloadKind.EMBEDDING), SIGNER, FailedPrecondition),
            (replace(handle, row_bytes=ROW - 4), SIGNER, FailedPrecondition),
        ]
        for changed, signer, expected in changes:
            error = await refused(one, begin(one, changed, signer), rows(piece(changed.landing_rows[0], 0, 1000)))
            assert type(error) is expected, (changed, error)
        altered = begin(one, handle)
        altered.begin.landing.parts[0].rows[0] = 9
        assert isinstance(await refused(one, altered, rows(piece(9, 0, 1000))), PermissionDenied)
        thief = begin(one, handle)
        thief.begin.sender.incarnation = "b" * 32
        assert isinstance(await refused(one, thief, rows(piece(handle.landing_rows[0], 0, 1000))), PermissionDenied)
        assert isinstance(await refused(one, begin(one, handle), within=None), InvalidArgument), "no deadline (L6)"
        assert isinstance(await refused(one), InvalidArgument)
        assert isinstance(await refused(one, rows(piece(0, 0, 1))), InvalidArgument)
        one.receiver.assert_untouched()
        assert one.receiver.transfer.inbound.open_transfers == 2
        assert not one.receiver.notices


WRONG: tuple[Callable[[int, int], transfer_pb2.WriteRequest], ...] = (
    lambda first, foreign: rows(piece(foreign, 0, 1000)),
    lambda first, foreign: rows(piece(first, 8, 1000)),
    lambda first, foreign: rows(piece(first, 0, ROW + 1)),
    lambda first, foreign: rows(piece(first, 0, 0)),
    lambda first, foreign: rows(piece(99, 0, 1000)),
    lambda first, foreign: rows(piece(0, 0, 1000, slot=True)),
    lambda first, foreign: transfer_pb2.WriteRequest(),
    lambda first, foreign: transfer_pb2.WriteRequest(end=transfer_pb2.WriteEnd(complete=True, bytes=1)),
)


async def test_bytes_outside_the_grant_end_the_transfer_unwritten() -> None:
    """L1, L7: foreign rows, gaps, more than a row, slots that were not granted, claims that are not so."""
    async with pair() as one:
        other = one.grant("other", 2)
        for index, wrong in enumerate(WRONG):
            handle = one.grant(f"r{index}", 2)
            message = wrong(handle.landing_rows[0], other.landing_rows[0])
            assert isinstance(await refused(one, begin(one, handle), message), InvalidArgument), index
            assert not (await one.receiver.noticed(handle)).nbytes
            late = await refused(one, begin(one, handle), rows(piece(handle.landing_rows[0], 0, 1000)))
            assert isinstance(late, NotFound), index
            one.receiver.assert_untouched()
        assert one.receiver.transfer.inbound.open_transfers == 1


async def test_a_byte_is_written_once_and_a_row_is_whole() -> None:
    """L1: the second write of a byte is refused, and so is a push that ends inside a row."""
    async with pair() as one:
        for name, messages in (
            ("twice", lambda row: [rows(piece(row, 0, ROW)), rows(piece(row, 0, 10))]),
            ("short", lambda row: [rows(piece(row, 0, 10))]),
        ):
            handle = one.grant(name, 1)
            error = await refused(one, begin(one, handle), *messages(handle.landing_rows[0]))
            assert isinstance(error, InvalidArgument), name
            await one.receiver.noticed(handle)
            assert one.receiver.landing.integrity().idle


async def test_certificates_of_other_roles_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """L25: an encoder sends embeddings, a prefill sends KV, each in its own name; nobody else sends anything."""
    for role in peers.PeerRole:
        allowed = role in (peers.PeerRole.ENCODER, peers.PeerRole.PREFILL, peers.PeerRole.WHOLE)
        assert peers.may_call(role, "/headrace.v1.TransferService/Write") is allowed
    async with pair() as one:
        handle = one.grant("r", 1)
        whole = rows(piece(handle.landing_rows[0], 0, 1000))
        for caller in (
            peers.Peer(peers.PeerRole.ENCODER, "prefill-0"),
            peers.Peer(peers.PeerRole.PREFILL, "prefill-1"),
        ):
            monkeypatch.setattr(peers, "caller", lambda caller=caller: caller)
            monkeypatch.setattr(peers, "_current", _Always(caller))
            assert isinstance(await refused(one, begin(one, handle), whole), PermissionDenied), caller
        one.receiver.assert_untouched()
        assert one.receiver.transfer.inbound.open_transfers == 1


class _Always:
    """A context variable that says one thing."""

    def __init__(self, caller: peers.Peer) -> None:
        self._caller = caller

    def get(self) -> peers.Peer:
        return self._caller

    def set(self, peer: peers.Peer | None) -> None:
        """The guard of a server without TLS says that there is nobody."""
