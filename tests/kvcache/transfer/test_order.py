"""L7, L11: whatever the order of push, end, completion, failure, deadline and disconnect, the last word is said once.

The transfer thread's own methods run here one after another over a wire that the test controls.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kvcache.handle import ChecksumKind, Handle, LandingPart, PayloadKind
from headrace.kvcache.transfer.admission import LocalIdentity, route_moves
from headrace.kvcache.transfer.base import PeerDescription, TransferSettings
from headrace.kvcache.transfer.errors import EngineClosed, PeerLost, PushRefused, TransferBusy, WireFailed
from headrace.kvcache.transfer.ledger import Ledger
from headrace.kvcache.transfer.loop import TransferThread
from headrace.kvcache.transfer.outbound import OutboundPush, Outgoing
from headrace.kvcache.transfer.peers import Peer, PeerTable, ProcessIdentity
from headrace.kvcache.transfer.pieces import Pieces
from headrace.kvcache.transfer.pushes import Outcome, Push, RowMove
from headrace.kvcache.transfer.regions import MemoryRegion, RegionDescription, RegionRole
from headrace.kvcache.transfer.staging import Staging
from headrace.kvcache.transfer.wire import decode_notice

FP, ITEM, ROWS, TRANSFERS = b"f" * 32, 8, 8, 2


@dataclass(eq=False)
class Request:
    transfer: set[int]
    """Landing rows it writes."""
    notice: bytes
    state: str = "in flight"


@dataclass
class FakeWire:
    """A wire that completes and fails when told to, and remembers every notice and what was in flight then."""

    requests: list[Request] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    broken: bool = False

    def post(self, peer: str, pieces: Pieces, source: Any, target: Any, notice: bytes) -> tuple[Request, bool]:
        if self.broken:
            raise PeerLost("r", "gone")
        rows = {
            int(start + offset) // ITEM
            for start, length in zip(pieces.target, pieces.length, strict=True)
            for offset in range(0, int(length), ITEM)
        }
        self.requests.append(Request(rows, notice))
        return self.requests[-1], False

    def is_complete(self, request: Request) -> bool:
        if request.state == "failed":
            raise WireFailed("told to")
        return request.state == "complete"

    def release(self, request: Request) -> None:
        assert request.state != "in flight"
        self.requests.remove(request)
        if request.notice and request.state == "complete":
            self.hear(request.notice)

    def notify(self, peer: str, message: bytes) -> None:
        if self.broken:
            raise PeerLost("r", "gone")
        self.hear(message)

    def hear(self, message: bytes) -> None:
        notice = decode_notice(message, "")
        index = int(notice.transfer_id)
        mine = set(range(index * ROWS, (index + 1) * ROWS))
        assert not any(request.transfer & mine for request in self.requests), "the last word came before the last write"
        assert notice.transfer_id not in self.said, "the last word came twice"
        self.said.append(notice.transfer_id)

    def unload(self, name: str) -> None:
        for request in self.requests:
            request.state = "failed"


class World:
    """A transfer thread that does not run by itself, two transfers of eight rows."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wire = FakeWire()
        self.ledger = Ledger(max_pushes=8)
        self.peers = PeerTable()
        self.thread = TransferThread(
            LocalIdentity("s", 0, FP, FP),
            TransferSettings(batch_bytes=2 * ITEM),
            (),
            self.ledger,
            self.peers,
            lambda: self.now,
            lambda: None,
        )
        thread: Any = self.thread
        thread._agent = self.wire
        thread._staging = Staging(2, 64, lambda tensor: None)  # type: ignore[arg-type,return-value]
        self.source = MemoryRegion("pool", torch.ones((TRANSFERS * ROWS, ITEM), dtype=torch.uint8))
        landing = RegionDescription(PayloadKind.KV, RegionRole.LANDING_ROWS, 0, ITEM, TRANSFERS * ROWS, "cpu", 0)
        description = PeerDescription("r", 0, "0.r", b"", 1, (landing,), FP, FP)
        self.peers.put(Peer(description, ProcessIdentity("b", "n", 1, 1), (1,), {("cpu", "cpu"): "cma"}))
        self.pushes: list[Push] = []
        self.settled: list[Push] = []
        self.terminal: list[Push] = []

    def handle(self, index: int) -> Handle:
        rows = tuple(range(index * ROWS, (index + 1) * ROWS))
        part = LandingPart(None, tuple(range(ROWS)), rows, None)
        return Handle(str(index), "r", "q", 1, 1, FP, FP, (part,), ITEM, 0, ChecksumKind.XXH3_64)

    def push(self, index: int, first: int, count: int, last: bool) -> None:
        peer = self.peers.find("r", 0)
        if peer is None:
            return
        rows = tuple(index * ROWS + row for row in range(first, min(ROWS, first + count)))
        moves = (RowMove("pool", rows, rows),)
        push = Push(self.handle(index), moves, len(rows) * ITEM)
        routes = route_moves(push.handle, moves, peer, {"pool": self.source}, None)

        def enqueue(record: Outgoing) -> None:
            outbound = OutboundPush(push, record, peer, routes, deadline=self.now + 5, timeout_s=5, last=last)
            self.thread.activate(outbound)
            self.pushes.append(push)
            push.settled.add_done_callback(lambda _: self.settled.append(push))
            push.terminal.add_done_callback(lambda _: self.terminal.append(push))

        try:
            self.ledger.admit(push, moves, last=last, enqueue=enqueue)
        except (PushRefused, TransferBusy, EngineClosed):
            return

    def end(self, index: int, outcome: Outcome) -> None:
        records: list[Outgoing] = []
        self.ledger.ending(self.handle(index), outcome, records.append)
        for record in records:
            self.thread.last_word(record)

    def step(self) -> None:
        thread: Any = self.thread
        for outbound in tuple(thread._active):
            thread._step(outbound)

    def judge(self, which: int, state: str) -> None:
        flying = [request for request in self.wire.requests if request.state == "in flight"]
        if flying:
            flying[which % len(flying)].state = state

    def check(self) -> None:
        for push in self.terminal:
            mine = set(push.moves[0].target_items)
            assert not any(request.transfer & mine for request in self.wire.requests), (
                "terminal with a write on the wire"
            )
            assert push.settled.done()
        assert len(set(map(id, self.terminal))) == len(self.terminal)
        assert len(self.ledger.states()) == len(self.pushes) - len(self.terminal)
        totals = self.ledger.totals
        assert totals.done + totals.failed == len(self.terminal)


def act(world: World, dice: random.Random) -> None:
    """One operation; most keep the wire busy, the fatal ones are rare, so that long interleavings are reached."""
    match dice.choices(("push", "step", "judge", "end", "clock", "break", "disconnect"), (30, 35, 28, 3, 2, 1, 1))[0]:
        case "push":
            world.push(dice.randrange(TRANSFERS), dice.randrange(ROWS), dice.randint(1, 3), dice.random() < 0.2)
        case "step":
            world.step()
        case "judge":
            world.judge(dice.randrange(10), "complete" if dice.random() < 0.9 else "failed")
        case "end":
            world.end(dice.randrange(TRANSFERS), dice.choice(list(Outcome)))
        case "clock":
            world.now += dice.uniform(0, 4)
        case "break":
            world.wire.broken = True
        case "disconnect":
            world.thread.disconnect("r")


@given(st.integers(0, 2**32))
@settings(max_examples=250, deadline=None)
def test_any_order_ends_quiet(seed: int) -> None:
    """L7, L11."""
    world, dice = World(), random.Random(seed)
    for _ in range(60):
        act(world, dice)
        world.check()
    # Everything that is on the wire completes; every owner says its last word.
    for _ in range(200):
        world.judge(0, "complete")
        world.step()
    for transfer in range(TRANSFERS):
        world.end(transfer, Outcome.FAILED)
    world.step()
    world.check()
    assert world.ledger.states() == []
    assert world.ledger.open_transfers == 0
    assert not world.wire.requests
    totals = world.ledger.totals
    assert totals.notices_sent + totals.notices_undelivered == TRANSFERS
    assert len(world.wire.said) == totals.notices_sent
