"""Rows pushed between two real processes over real NIXL arrive byte for byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import xxhash

from headrace.kvcache.checksum import checksums
from headrace.kvcache.handle import ChecksumKind
from headrace.kvcache.transfer.base import TransferSettings
from headrace.kvcache.transfer.nixl import NixlTransferEngine
from headrace.kvcache.transfer.pushes import Outcome, RowMove
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole
from headrace.kvcache.transfer.wire_job import PushState

TCP = TransferSettings(allowed_transports=frozenset({"tcp"}))
CMA = TransferSettings(allowed_transports=frozenset({"cma"}))
WIRES = pytest.mark.parametrize(("settings", "wire"), [(CMA, "cma"), (TCP, "tcp")], ids=["cma", "tcp"])
Make = Callable[..., Any]


def wait_for_notices(engine: Any, count: int = 1, seconds: float = 60.0) -> list[Any]:
    """Bounded polling."""
    deadline = time.monotonic() + seconds
    found: list[Any] = []
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} notices came"
        found += engine.take_notices()
        time.sleep(0.001)
    return found


@WIRES
def test_rows_and_slot_arrive(
    settings: TransferSettings,
    wire: str,
    process: ModuleType,
    make_sender: Make,
    make_receiver: Make,
    incarnation: Make,
) -> None:
    """Scattered and consecutive rows and a slot, in two pushes; the notice comes behind the last byte."""
    receiver = make_receiver(incarnation(), settings)
    sender = make_sender(incarnation(), settings, seed=3)
    assert sender.call("connect", receiver.description) == wire
    grant = process.handle(receiver.description, "t1", (7, 8, 9, 10, 40, 3, 95), slot=2)
    receiver.engine.expect("t1")

    first = sender.call("push", grant, (RowMove("pool", (1, 2, 3, 4), (7, 8, 9, 10)),), False)
    second = sender.call(
        "push",
        grant,
        (
            RowMove("pool", (60, 20, 5), (40, 3, 95)),
            RowMove("slots", (1,), (2,), RegionRole.LANDING_SLOTS),
        ),
        True,
    )

    (notice,) = wait_for_notices(receiver.engine)
    assert (notice.transfer_id, notice.request_id, notice.outcome) == ("t1", grant.request_id, Outcome.OK)
    assert notice.nbytes == 7 * process.ROW_BYTES + process.SLOT_BYTES == first.nbytes + second.nbytes
    for source, target in ((1, 7), (2, 8), (3, 9), (4, 10), (60, 40), (20, 3), (5, 95)):
        assert receiver.landing[target].equal(sender.pool[source])
    assert receiver.slots[2].equal(sender.slots[1])
    untouched = sorted(set(range(96)) - set(grant.landing_rows))
    assert not receiver.landing[untouched].any()
    assert not receiver.slots[[0, 1, 3]].any()

    assert first.checksums == (tuple(xxhash.xxh3_64_intdigest(sender.pool[row].numpy().data) for row in (1, 2, 3, 4)),)
    assert second.checksums[1] == checksums(receiver.slots, (2,), ChecksumKind.XXH3_64)
    assert first.transport == second.transport == wire
    assert first.descriptors == 1, "four rows that are neighbours on both sides are one piece"
    stats = sender.call("stats")
    assert stats.idle
    assert (stats.pushes_done, stats.notices_sent, stats.bytes_sent) == (2, 1, notice.nbytes)


@WIRES
def test_gathered_rows_arrive(
    settings: TransferSettings,
    wire: str,
    process: ModuleType,
    make_sender: Make,
    make_receiver: Make,
    incarnation: Make,
) -> None:
    """The way rows take on a GPU (gather kernel, staging region, few pieces), forced on host memory."""
    gathering = replace(settings, gather=True, staging_bytes=6 * process.ROW_BYTES, window=2)
    receiver = make_receiver(incarnation(), settings)
    sender = make_sender(incarnation(), gathering, seed=4)
    sender.call("connect", receiver.description)
    sources = tuple(range(63, 3, -3))
    targets = tuple(range(50, 50 + len(sources)))
    grant = process.handle(receiver.description, "t1", targets, checksum_kind=ChecksumKind.LANES_64)
    result = sender.call("push", grant, (RowMove("pool", sources, targets),), True)
    wait_for_notices(receiver.engine)
    assert receiver.landing[list(targets)].equal(sender.pool[list(sources)])
    assert result.checksums == (checksums(receiver.landing, targets, ChecksumKind.LANES_64),)
    assert result.descriptors == 7, "20 scattered rows in staging slots of three rows"


def test_a_transfer_ends_without_a_last_push(
    process: ModuleType, make_sender: Make, make_receiver: Make, incarnation: Make
) -> None:
    """An abort before anything, or after some pushes, still says its last word (L7): FAILED, with what landed."""
    receiver = make_receiver(incarnation())
    sender = make_sender(incarnation())
    sender.call("connect", receiver.description)
    never = process.handle(receiver.description, "never pushed", (1,))
    some = process.handle(receiver.description, "some pushed", (2, 3))
    sender.call("push", some, (RowMove("pool", (5,), (2,)),), False)
    sender.call("end", never, Outcome.FAILED)
    sender.call("end", some, Outcome.FAILED)
    sender.call("end", some, Outcome.OK)  # idempotent: no second notice
    notices = {notice.transfer_id: notice for notice in wait_for_notices(receiver.engine, 2)}
    assert {notice.outcome for notice in notices.values()} == {Outcome.FAILED}
    assert notices["never pushed"].nbytes == 0
    assert notices["some pushed"].nbytes == process.ROW_BYTES
    assert sender.call("stats").notices_sent == 2


def test_pushes_to_two_receivers_at_once(
    process: ModuleType, make_sender: Make, make_receiver: Make, incarnation: Make
) -> None:
    receivers = [make_receiver(incarnation()) for _ in range(2)]
    sender = make_sender(incarnation(), seed=6)
    for index, receiver in enumerate(receivers):
        sender.call("connect", receiver.description)
        grant = process.handle(receiver.description, f"t{index}", tuple(range(10)))
        sources = tuple(range(index * 10, index * 10 + 10))
        sender.call("push", grant, (RowMove("pool", sources, tuple(range(10))),), True)
    for index, receiver in enumerate(receivers):
        wait_for_notices(receiver.engine)
        assert receiver.landing[:10].equal(sender.pool[index * 10 : index * 10 + 10])


async def test_a_push_is_awaited_without_blocking_the_loop(
    process: ModuleType, make_receiver: Make, incarnation: Make
) -> None:
    """Two engines in one process; cancelling the waiter does not cancel what is on the wire (L7)."""
    receiver = make_receiver(incarnation())
    engine = NixlTransferEngine(
        incarnation=incarnation(), layout_fingerprint=process.LAYOUT, model_fingerprint=process.MODEL
    )
    try:
        pool = process.pattern(9, 8, process.ROW_BYTES)
        engine.register(MemoryRegion("pool", pool))
        await asyncio.wrap_future(engine.connect(receiver.description))
        push = engine.push(
            process.handle(receiver.description, "a", (0, 1)), [RowMove("pool", (0, 1), (0, 1))], last=True
        )
        assert (await push).nbytes == 2 * process.ROW_BYTES

        push = engine.push(process.handle(receiver.description, "b", (2,)), [RowMove("pool", (2,), (2,))], last=True)

        async def wait() -> None:
            await push

        waiter = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiter.cancel()
        assert await asyncio.wrap_future(push.terminal) is PushState.DONE
        assert receiver.landing[:3].equal(pool[:3])
    finally:
        engine.close()


class Later:
    """Device work that is done when the test says so."""

    def __init__(self) -> None:
        self.done = False
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.done


def test_nothing_is_sent_before_the_rows_are_ready(process: ModuleType, make_receiver: Make, incarnation: Make) -> None:
    """Rows still being computed on a device are neither read nor sent, and nobody blocks on them."""
    receiver = make_receiver(incarnation())
    engine = NixlTransferEngine(
        incarnation=incarnation(), layout_fingerprint=process.LAYOUT, model_fingerprint=process.MODEL
    )
    try:
        pool = process.pattern(9, 4, process.ROW_BYTES)
        engine.register(MemoryRegion("pool", pool))
        engine.connect(receiver.description).result(30)
        ready = Later()
        push = engine.push(
            process.handle(receiver.description, "a", (0,)), [RowMove("pool", (0,), (0,))], last=True, ready=ready
        )
        deadline = time.monotonic() + 60
        while ready.asked < 3:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert push.state is PushState.POSTING
        assert not receiver.landing.any()
        pool[0].fill_(77)
        ready.done = True
        result = push.wait(30)
        assert receiver.landing[0].equal(pool[0])
        assert result.checksums == (checksums(pool, (0,), ChecksumKind.XXH3_64),)
    finally:
        engine.close()
