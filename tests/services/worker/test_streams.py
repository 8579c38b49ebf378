"""Rows by byte stream: the same guarantees as over the wire of memory, and none of its late writes (L6, L7)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from headrace.kvcache.landing_types import TransferState
from headrace.kvcache.transfer.base import TransferSettings
from headrace.kvcache.transfer.errors import PeerLost, PeerRefused, PushCut, PushDeadline, PushRefused
from headrace.kvcache.transfer.pushes import Outcome, RowMove
from headrace.kvcache.transfer.regions import RegionRole
from headrace.kvcache.transfer.routed import Mode
from headrace.kvcache.transfer.wire_job import PushState
from headrace.services.worker import row_wire
from headrace.v1 import common_pb2
from tests.services.worker._streams import PATIENCE_S, ROW, End, Pair, elsewhere, pair


class Gate:
    """Lets a sender's stream write so many messages and holds it there."""

    def __init__(self, one: Pair, messages: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        self._left = messages
        original = row_wire._GrpcStream.write

        async def write(stream: Any, pieces: Any) -> None:
            if self._left == 0:
                self.reached.set()
                await self.open.wait()
            self._left = max(0, self._left - 1)
            await original(stream, pieces)

        monkeypatch.setattr(row_wire._GrpcStream, "write", write)


async def test_rows_and_a_slot_land_and_the_notice_comes_behind_them() -> None:
    """Two pushes under one handle; big items in several messages; sums of both ends; nothing stays open (L11)."""
    async with pair() as one:
        transfer = one.sender.transfer
        handle = one.grant("r", 5, slot=True)
        rows, slot = handle.parts[0].rows, handle.parts[0].slot
        assert slot is not None
        first = transfer.push(handle, [RowMove("pool", (9, 3), rows[:2])])
        last = transfer.push(
            handle,
            [RowMove("pool", (4, 5, 6), rows[2:]), RowMove("slot pool", (1,), (slot,), RegionRole.LANDING_SLOTS)],
            last=True,
        )
        results = [await first, await last]
        assert {result.transport for result in results} == {"stream"}
        notice = await one.receiver.noticed(handle)
        assert notice.outcome is Outcome.OK
        assert notice.nbytes == sum(result.nbytes for result in results)
        sums = (*results[0].checksums[0], *results[1].checksums[0])
        landed = one.receiver.take(handle, sums, results[1].checksums[1][0])
        assert landed.equal(one.pool[[9, 3, 4, 5, 6]])
        await asyncio.wrap_future(transfer.end(handle, Outcome.OK))
        assert one.receiver.transfer.inbound.open_transfers == 0
        assert one.receiver.landing.integrity().idle
        assert set(transfer.stats().transports.values()) == {"stream"}
        with pytest.raises(PushRefused, match="ended"):
            transfer.push(handle, [RowMove("pool", (0,), rows[:1])])


async def test_an_unused_handle_is_given_back() -> None:
    """L10: the last word alone, and twice."""
    async with pair() as one:
        handle = one.grant("r", 3)
        for _ in range(2):
            await asyncio.wrap_future(one.sender.transfer.end(handle))
        assert (await one.receiver.noticed(handle)).outcome is Outcome.FAILED
        assert one.receiver.landing.integrity().idle
        one.receiver.assert_untouched()


async def test_a_cancelled_push_stops_after_the_piece_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """L7: what is cut is terminal at once, the receiver's rows come free, and what follows is refused."""
    async with pair() as one:
        gate = Gate(one, 2, monkeypatch)
        handle = one.grant("r", 6)
        push = one.sender.transfer.push(handle, [RowMove("pool", tuple(range(6)), handle.landing_rows)], last=True)
        async with asyncio.timeout(PATIENCE_S):
            await gate.reached.wait()
        one.sender.transfer.cut(handle)
        with pytest.raises(PushCut):
            await push
        assert push.terminal.result() is PushState.FAILED
        assert (await one.receiver.noticed(handle)).outcome is Outcome.FAILED
        assert one.receiver.landing.integrity().idle
        assert (await one.receiver.noticed(handle)).nbytes <= 2 * ROW
        gate.open.set()


async def test_a_late_stream_never_reaches_rows_that_are_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """L7: a sender that stalls in mid-stream loses its reservation; its rows are granted again; it wakes and writes."""
    async with pair() as one:
        gate = Gate(one, 1, monkeypatch)
        stalled = one.grant("stalled", 8)
        push = one.sender.transfer.push(stalled, [RowMove("pool", tuple(range(8)), stalled.landing_rows)], last=True)
        async with asyncio.timeout(PATIENCE_S):
            await gate.reached.wait()
        await one.until(lambda: one.receiver.landing.rows[stalled.landing_rows[0]].any())
        landing = one.receiver.landing
        landing.abort("stalled", 1)
        assert landing.state(stalled.transfer_id) is TransferState.QUARANTINED
        one.receiver.transfer.forget(stalled.transfer_id)
        assert (await one.receiver.noticed(stalled)).outcome is Outcome.FAILED
        assert landing.state(stalled.transfer_id) is None
        other = one.receiver.grant("other", 8, None)
        assert other.landing_rows == stalled.landing_rows
        landing.rows[:] = 7
        gate.open.set()
        with pytest.raises(Exception, match="over"):
            await push
        assert bool((landing.rows == 7).all())
        assert landing.state(other.transfer_id) is TransferState.OPEN


async def test_a_sender_that_vanishes_in_mid_stream_frees_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """L6: the broken connection is the last word, on whatever host it was; the push is lost at once."""
    async with pair() as one:
        gate = Gate(one, 1, monkeypatch)
        handle = one.grant("r", 6)
        push = one.sender.transfer.push(handle, [RowMove("pool", tuple(range(6)), handle.landing_rows)], last=True)
        async with asyncio.timeout(PATIENCE_S):
            await gate.reached.wait()
        await one.sender.channels.close()
        assert (await one.receiver.noticed(handle)).outcome is Outcome.FAILED
        gate.open.set()
        with pytest.raises(PeerLost):
            await push
        with pytest.raises(PeerLost):
            one.sender.transfer.push(handle, [RowMove("pool", (7,), (7,))])
        await one.connect()
        again = one.grant("again", 1)
        assert (await one.sender.transfer.push(again, [RowMove("pool", (7,), again.landing_rows)], last=True)).nbytes


async def test_a_receiver_that_takes_nothing_holds_up_its_own_pushes_alone() -> None:
    """L6, L12: flow control reaches the sender; the deadline ends the push, whose source rows are free then."""
    async with pair() as one, pair() as other:
        one.receiver.servicer.go_on.clear()
        transfer = one.sender.transfer
        handles = [one.grant(f"r{index}", 5) for index in range(3)]
        pushes = [
            transfer.push(handle, [RowMove("pool", tuple(range(5)), handle.landing_rows)], last=True, timeout_s=3.0)
            for handle in handles
        ]
        await asyncio.wrap_future(transfer.connect(other.description))
        handle = other.receiver.grant("r", 16, one.sender.peer)
        await transfer.push(handle, [RowMove("pool", tuple(range(16)), handle.landing_rows)], last=True)
        for push in pushes:
            with pytest.raises(PushDeadline):
                await push
            assert push.terminal.result() is PushState.FAILED
        one.receiver.servicer.go_on.set()
        one.receiver.assert_untouched()


async def test_each_peer_gets_the_fastest_wire_that_is_allowed() -> None:
    """Same host: shared memory. Another host: UCX where a network is trusted, else a stream, else a refusal."""
    async with pair() as one:
        here = one.description
        there = elsewhere(here)
        auto, trusted, nixl = (
            End("prefill-1", TransferSettings(net_devices=devices), mode)
            for devices, mode in (("none", Mode.AUTO), ("lo", Mode.AUTO), ("none", Mode.NIXL))
        )
        try:
            assert await asyncio.wrap_future(auto.transfer.connect(here)) != "stream"
            await asyncio.wrap_future(auto.transfer.disconnect(here.incarnation))
            fresh = End("prefill-2", TransferSettings(net_devices="none"), Mode.AUTO)
            assert await asyncio.wrap_future(fresh.transfer.connect(there)) == "stream"
            await fresh.close()
            assert trusted.transfer._by_stream(there) is False
            for engine, description in ((nixl, there), (auto, replace(there, listener="", incarnation="f" * 32))):
                with pytest.raises(PeerRefused):
                    await asyncio.wrap_future(engine.transfer.connect(description))
        finally:
            for end in (auto, trusted, nixl):
                await end.close()


async def test_a_sender_that_cannot_be_looked_at_loses_its_streams_when_it_leaves() -> None:
    """L6: no evidence of death is needed where this side does the writing. One that may write memory keeps its rows."""
    async with pair() as one:
        receiver, inbound = one.receiver.transfer, one.receiver.transfer.inbound
        handle, sender = one.grant("r", 4), one.sender.peer.incarnation
        assert receiver.sender_left(sender, elsewhere=False) == 0
        await one.sender.transfer.push(handle, [RowMove("pool", (1,), handle.landing_rows[:1])])
        assert receiver.sender_left(sender, elsewhere=False) == 1
        assert (await one.receiver.noticed(handle)).outcome is Outcome.FAILED
        silent = common_pb2.PeerId(replica_id="prefill-9", incarnation="9" * 32)
        foreign = one.receiver.grant("f", 2, silent)
        assert receiver.sender_left(silent.incarnation, elsewhere=False) == 0
        assert receiver.sender_left(silent.incarnation, elsewhere=True) == 1
        assert (await one.receiver.noticed(foreign)).outcome is Outcome.FAILED
        last = one.grant("last", 4)
        receiver.sender_died(sender)
        assert inbound.open_transfers == 0
        with pytest.raises(Exception, match="not open"):
            await one.sender.transfer.push(last, [RowMove("pool", (1,), last.landing_rows[:1])])
        for over in (handle, last):
            await asyncio.wrap_future(one.sender.transfer.end(over))
        dead = one.grant("dead", 4)
        assert inbound.open_transfers == 0, "a grant to a dead sender lets nothing in"
        assert dead.landing_rows
