"""Peers that stop, wake late, or die in the middle of a push: real processes, real signals, real NIXL."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.kvcache.handle import ChecksumKind, Handle
from headrace.kvcache.landing import (
    LandingIdentity,
    LandingRegion,
    NoticeResult,
    NotQuiet,
    PartChecksums,
    PartRequest,
    PartTarget,
    TransferState,
)
from headrace.kvcache.transfer.base import TransferSettings
from headrace.kvcache.transfer.errors import PeerLost, PeerRefused, PushDeadline, PushRefused, Refusal
from headrace.kvcache.transfer.nixl import NixlTransferEngine
from headrace.kvcache.transfer.peers import Liveness
from headrace.kvcache.transfer.pushes import Outcome, RowMove, TerminalNotice
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole
from headrace.kvcache.transfer.wire import process_of
from headrace.kvcache.transfer.wire_job import PushState

Make = Callable[..., Any]
BLOCKS = 48
CMA = frozenset({"cma"})
TCP = frozenset({"tcp"})


def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Bounded polling."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.001)


class Decode:
    """A receiver as a decode worker has it: landing region, pool, engine, and a clock that the test turns."""

    def __init__(self, process: ModuleType, incarnation: str, settings: TransferSettings) -> None:
        identity = LandingIdentity(incarnation, process.LAYOUT, process.MODEL, ChecksumKind.XXH3_64)
        self.landing = LandingRegion(
            identity, row_bytes=process.ROW_BYTES, slot_bytes=0, num_rows=2 * BLOCKS + 16, num_slots=0
        )
        self.pool = torch.zeros((BLOCKS + 1, process.ROW_BYTES), dtype=torch.uint8)
        self.engine = NixlTransferEngine(
            incarnation=incarnation,
            layout_fingerprint=process.LAYOUT,
            model_fingerprint=process.MODEL,
            settings=settings,
        )
        self.engine.register(MemoryRegion("landing", self.landing.rows, RegionRole.LANDING_ROWS))

    def reserve(self, attempt: int, *, deadline: float, sender: str, request: str = "r") -> Handle:
        parts = [PartRequest(None, tuple(range(BLOCKS)), with_slot=False)]
        grant = self.landing.reserve(request, attempt, parts, deadline=deadline, sender=sender)
        self.engine.expect(grant.transfer_id)
        return grant

    def next_notice(self) -> TerminalNotice:
        found: list[TerminalNotice] = []
        until(lambda: found.extend(self.engine.take_notices()) or found, "a notice")
        (notice,) = found
        return notice

    def bytes_of(self, grant: Handle) -> torch.Tensor:
        return self.landing.rows[list(grant.landing_rows)]


@pytest.fixture
def make_decode(process: ModuleType, incarnation: Make) -> Any:
    made: list[Decode] = []

    def make(settings: TransferSettings) -> Decode:
        made.append(Decode(process, incarnation(), settings))
        return made[-1]

    yield make
    for decode in made:
        decode.engine.close()


def whole_push(grant: Handle) -> tuple[RowMove, ...]:
    return (RowMove("pool", tuple(range(1, 1 + len(grant.landing_rows))), grant.landing_rows),)


@pytest.mark.parametrize("wires", [CMA, TCP], ids=["cma", "tcp"])
def test_a_sender_stopped_in_mid_push_spoils_no_running_request(
    wires: frozenset[str], process: ModuleType, make_decode: Any, make_sender: Make, incarnation: Make
) -> None:
    """L6, L7: SIGSTOP in mid-push, expiry, resend under a new transfer, SIGCONT: the late write lands in quarantine
    only, the pool keeps its bytes, the late notice is recognised by its id and then the rows are free."""
    # One row a request, stopped between two requests.
    settings = TransferSettings(allowed_transports=wires, batch_bytes=1)
    decode = make_decode(settings)
    frozen_id, other_id = incarnation(), incarnation()
    frozen = make_sender(frozen_id, settings, seed=11, rows=BLOCKS + 1)
    other = make_sender(other_id, settings, seed=12, rows=BLOCKS + 1)
    for sender in (frozen, other):
        sender.call("connect", decode.engine.describe())

    frozen_description = frozen.call("describe")

    # The first sender stops in the middle of its push.
    first = decode.reserve(1, deadline=10.0, sender=frozen_id)
    frozen.call("push_gated", first, whole_push(first), 60.0)
    assert frozen.gate.poll(30), "the sender never posted"
    frozen.gate.recv()
    frozen.signal(signal.SIGSTOP)
    until(lambda: frozen.state() == "T", "the sender to stop")
    frozen.gate.send("go on once you run again")
    assert not decode.bytes_of(first)[-1].any(), "the push was over before the sender stopped"

    # Its receiver's deadline passes: the request's wait ends, the rows do not become free.
    assert decode.landing.expire(11.0) == (first,)
    assert decode.landing.state(first.transfer_id) is TransferState.QUARANTINED
    with pytest.raises(NotQuiet):
        decode.landing.take(first, [], [], decode.pool)
    assert process_of(frozen_description).liveness() is Liveness.ALIVE

    # The resend has a new id and other rows, and is taken into the pool.
    second = decode.reserve(2, deadline=99.0, sender=other_id)
    assert second.transfer_id != first.transfer_id
    assert not set(second.landing_rows) & set(first.landing_rows)
    result = other.call("push", second, whole_push(second), True)
    notice = decode.next_notice()
    assert (notice.transfer_id, notice.outcome) == (second.transfer_id, Outcome.OK)
    assert decode.landing.notice(notice.transfer_id, complete=True) is NoticeResult.READY
    targets = [PartTarget(tuple(range(1, BLOCKS + 1)))]
    decode.landing.take(second, [PartChecksums(result.checksums[0])], targets, decode.pool)
    assert decode.pool[1:].equal(other.pool[1:])

    # A third transfer reuses the second one's landing rows while the frozen sender wakes.
    third = decode.reserve(1, deadline=99.0, sender=other_id, request="another")
    assert not set(third.landing_rows) & set(first.landing_rows)
    other.call("push", third, whole_push(third), True)
    assert decode.next_notice().transfer_id == third.transfer_id
    pool_before, third_before = decode.pool.clone(), decode.bytes_of(third).clone()

    frozen.signal(signal.SIGCONT)
    late = decode.next_notice()
    assert late.transfer_id == first.transfer_id
    assert decode.bytes_of(first).equal(frozen.pool[1:]), "the late write did land, in quarantined rows"
    assert decode.pool.equal(pool_before)
    assert decode.bytes_of(third).equal(third_before)

    # Recognised by its id: nobody waits for it, its rows are free now, and only now.
    assert decode.landing.integrity().rows.quarantined == BLOCKS
    assert decode.landing.notice(late.transfer_id, complete=True) is NoticeResult.RELEASED
    assert decode.landing.notice(late.transfer_id, complete=True) is NoticeResult.LATE
    integrity = decode.landing.integrity()
    assert integrity.sound
    assert integrity.rows.quarantined == 0
    assert frozen.call("outcome", first.transfer_id) == PushState.DONE


def test_a_sender_killed_in_mid_push_is_terminal_by_death(
    process: ModuleType, make_decode: Any, make_sender: Make, incarnation: Make
) -> None:
    """L6: no notice will come; the known death of the process frees the rows."""
    settings = TransferSettings(allowed_transports=CMA, batch_bytes=1)
    decode = make_decode(settings)
    sender_id = incarnation()
    sender = make_sender(sender_id, settings, rows=BLOCKS + 1)
    description = sender.call("describe")
    sender.call("connect", decode.engine.describe())
    grant = decode.reserve(1, deadline=10.0, sender=sender_id)
    sender.call("push_gated", grant, whole_push(grant), 60.0)
    assert sender.gate.poll(30)
    decode.landing.expire(11.0)
    assert process_of(description).liveness() is Liveness.ALIVE
    assert decode.landing.integrity().rows.quarantined == BLOCKS
    sender.kill()
    assert process_of(description).liveness() is Liveness.DEAD
    decode.landing.sender_died(sender_id)
    assert decode.landing.integrity().idle
    assert decode.engine.take_notices() == []


def make_engine(process: ModuleType, incarnation: str, **more: Any) -> tuple[NixlTransferEngine, torch.Tensor]:
    engine = NixlTransferEngine(
        incarnation=incarnation, layout_fingerprint=process.LAYOUT, model_fingerprint=process.MODEL, **more
    )
    pool = process.pattern(21, BLOCKS + 1, process.ROW_BYTES)
    engine.register(MemoryRegion("pool", pool))
    return engine, pool


@pytest.mark.parametrize("wires", [CMA, TCP], ids=["cma", "tcp"])
def test_a_killed_receiver_raises_at_the_next_push(
    wires: frozenset[str], process: ModuleType, make_sender: Make, incarnation: Make
) -> None:
    """L14: the death is a typed error, the dead incarnation is refused ever after, its successor is welcome."""
    settings = TransferSettings(allowed_transports=wires)
    receiver = make_sender(incarnation(), settings)
    description = receiver.call("land", 8)
    engine, pool = make_engine(process, incarnation(), settings=settings)
    try:
        engine.connect(description).result(30)
        grant = process.handle(description, "t", (0, 1, 2))
        engine.push(grant, [RowMove("pool", (0,), (0,))]).wait(30)
        receiver.kill()

        push = engine.push(grant, [RowMove("pool", (1,), (1,))])
        with pytest.raises(PeerLost):
            push.wait(30)
        assert push.terminal.result(30) is PushState.FAILED
        with pytest.raises(PeerLost):
            engine.push(grant, [RowMove("pool", (2,), (2,))])
        with pytest.raises(PeerLost):
            engine.end(grant).result(30)  # the notice cannot be delivered: said, not swallowed
        stats = engine.stats()
        assert stats.idle
        assert (stats.pushes_failed, stats.notices_undelivered) == (1, 1)

        engine.disconnect(description.incarnation).result(30)
        with pytest.raises(PushRefused) as stale:
            engine.push(process.handle(description, "t2", (0,)), [RowMove("pool", (0,), (0,))])
        assert stale.value.reason is Refusal.INCARNATION
        with pytest.raises(PeerRefused) as gone:
            engine.connect(description).result(30)
        assert gone.value.reason is Refusal.INCARNATION

        successor = make_sender(incarnation(), settings)
        reborn = successor.call("land", 8)
        engine.connect(reborn).result(30)
        engine.push(process.handle(reborn, "t3", (5,)), [RowMove("pool", (4,), (5,))], last=True).wait(30)
        assert successor.call("landed", 5) == pool[4].numpy().tobytes()
    finally:
        engine.close()


def test_a_deadline_ends_the_wait_and_not_the_rows(process: ModuleType, make_sender: Make, incarnation: Make) -> None:
    """L6, L7: the receiver is stopped, so the write hangs on the wire: past its deadline the push is abandoned, its
    source rows stay pinned, and it becomes terminal when the receiver goes on."""
    settings = TransferSettings(allowed_transports=TCP, batch_bytes=1 << 30, window=4)
    now = [0.0]
    receiver = make_sender(incarnation(), settings)
    description = receiver.call("land", 4 * BLOCKS)
    engine, pool = make_engine(process, incarnation(), settings=settings, clock=lambda: now[0])
    try:
        engine.connect(description).result(30)
        receiver.signal(signal.SIGSTOP)
        until(lambda: receiver.state() == "T", "the receiver to stop")
        # More than the sockets' buffers hold, so that it cannot complete.
        rows = tuple(range(1, BLOCKS + 1))
        moves = [RowMove("pool", rows, tuple(range(part * BLOCKS, (part + 1) * BLOCKS))) for part in range(4)]
        grant = process.handle(description, "t", tuple(range(4 * BLOCKS)))
        push = engine.push(grant, moves, timeout_s=5.0)
        until(lambda: push.state is PushState.IN_FLIGHT, "the posts")
        assert not push.settled.done()
        now[0] = 6.0
        with pytest.raises(PushDeadline):
            push.wait(30)
        assert push.state is PushState.ABANDONED
        assert not push.terminal.done()
        assert engine.stats().pushes_abandoned == 1
        with pytest.raises(ValueError, match="L7"):
            engine.deregister("pool")
        receiver.signal(signal.SIGCONT)
        assert push.terminal.result(30) is PushState.DONE, "late, and landed"
        assert receiver.call("landed", 4 * BLOCKS - 1) == pool[BLOCKS].numpy().tobytes()
        engine.end(grant, Outcome.OK).result(30)
        assert engine.stats().idle
        found: list[TerminalNotice] = []
        until(lambda: found.extend(receiver.call("notices")) or found, "the notice")
        assert found[0].transfer_id == "t"
        engine.deregister("pool")
    finally:
        engine.close()


def test_disconnecting_ends_what_hangs_on_the_wire(process: ModuleType, make_sender: Make, incarnation: Make) -> None:
    """L6, L14: a receiver that is given up takes no push with it for ever; its open transfers end, said or not."""
    settings = TransferSettings(allowed_transports=TCP, batch_bytes=1 << 30, window=4)
    receiver = make_sender(incarnation(), settings)
    description = receiver.call("land", 4 * BLOCKS)
    engine, _ = make_engine(process, incarnation(), settings=settings)
    try:
        engine.connect(description).result(30)
        receiver.signal(signal.SIGSTOP)
        until(lambda: receiver.state() == "T", "the receiver to stop")
        rows = tuple(range(1, BLOCKS + 1))
        moves = [RowMove("pool", rows, tuple(range(part * BLOCKS, (part + 1) * BLOCKS))) for part in range(4)]
        grant = process.handle(description, "t", tuple(range(4 * BLOCKS)))
        push = engine.push(grant, moves)
        until(lambda: push.state is PushState.IN_FLIGHT, "the posts")
        said = engine.end(grant)
        engine.disconnect(description.incarnation).result(30)
        with pytest.raises(PeerLost):
            push.wait(30)
        assert push.terminal.result(30) is PushState.FAILED
        with pytest.raises(PeerLost):
            said.result(30)
        until(lambda: engine.stats().idle, "the engine to be idle")
    finally:
        engine.close()
