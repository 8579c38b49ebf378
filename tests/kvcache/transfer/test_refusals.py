"""L1: handles are exact. Whatever is wrong with one is refused by the sender before a byte is posted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from threading import Event
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.kvcache.handle import ChecksumKind, Handle, LandingPart, PayloadKind
from headrace.kvcache.transfer.base import PeerDescription, TransferSettings
from headrace.kvcache.transfer.errors import (
    EngineClosed,
    PeerLost,
    PeerRefused,
    PushRefused,
    Refusal,
    TransferBusy,
)
from headrace.kvcache.transfer.nixl import NixlTransferEngine
from headrace.kvcache.transfer.pushes import Outcome, RowMove
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole

Make = Callable[..., Any]


@dataclass
class Pair:
    """A sender and a receiver; refusals need no second process, since nothing may be posted."""

    sender: NixlTransferEngine
    receiver: Any
    grant: Handle

    def assert_nothing_was_posted(self) -> None:
        stats = self.sender.stats()
        assert stats.idle
        assert stats.bytes_sent == 0
        assert not self.receiver.landing.any()


@pytest.fixture
def pair(process: ModuleType, make_receiver: Make, incarnation: Make) -> Iterator[Pair]:
    receiver = make_receiver(incarnation())
    sender = NixlTransferEngine(
        incarnation=incarnation(),
        layout_fingerprint=process.LAYOUT,
        model_fingerprint=process.MODEL,
        settings=TransferSettings(max_pushes=2),
    )
    sender.register(MemoryRegion("pool", process.pattern(1, 16, process.ROW_BYTES)))
    sender.register(MemoryRegion("odd", torch.ones((4, process.ROW_BYTES + 2), dtype=torch.uint8)))
    sender.connect(receiver.description).result(30)
    yield Pair(sender, receiver, process.handle(receiver.description, "t", (4, 5, 6), slot=1))
    sender.close()


GOOD = RowMove("pool", (1, 2, 3), (4, 5, 6))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"incarnation": "f" * 32}, Refusal.NOT_CONNECTED),
        ({"rank": 1}, Refusal.NOT_CONNECTED),
        ({"layout_fingerprint": b"x" * 32}, Refusal.LAYOUT),
        ({"model_fingerprint": b"x" * 32}, Refusal.MODEL),
        ({"metadata_version": 2}, Refusal.METADATA_VERSION),
        ({"payload": PayloadKind.EMBEDDING}, Refusal.TARGET),
        ({"row_bytes": 114_044}, Refusal.SIZES),
        ({"transfer_id": ""}, Refusal.TARGET),
        ({"attempt": 0}, Refusal.TARGET),
        ({"parts": ()}, Refusal.TARGET),
        ({"parts": (LandingPart(None, (0, 1), (4, 5), None),)}, Refusal.TARGET),
        ({"parts": (LandingPart(None, (0, 1, 2), (5, 6, 7), None),)}, Refusal.TARGET),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_wrong_handles(pair: Pair, change: dict[str, Any], reason: Refusal) -> None:
    """L1: another life, layout, model, landing region, size or grant; a truncated one."""
    with pytest.raises(PushRefused) as refused:
        pair.sender.push(replace(pair.grant, **change), [GOOD])
    assert refused.value.reason is reason
    pair.assert_nothing_was_posted()


@pytest.mark.parametrize(
    ("move", "reason"),
    [
        (RowMove("pool", (1,), (7,)), Refusal.TARGET),
        (RowMove("pool", (1,), (-1,)), Refusal.TARGET),
        (RowMove("pool", (16,), (4,)), Refusal.SOURCE),
        (RowMove("pool", (-1,), (4,)), Refusal.SOURCE),
        (RowMove("pool", (1, 2), (4,)), Refusal.SOURCE),
        (RowMove("pool", (), ()), Refusal.SOURCE),
        (RowMove("nowhere", (1,), (4,)), Refusal.SOURCE),
        (RowMove("pool", (1, 2), (4, 4)), Refusal.CONFLICT),
        (RowMove("odd", (1,), (4,)), Refusal.SIZES),
        (RowMove("pool", (1,), (1,), RegionRole.LANDING_SLOTS), Refusal.SIZES),
        (RowMove("pool", (1,), (4,), RegionRole.SOURCE), Refusal.TARGET),
    ],
)
def test_wrong_rows(pair: Pair, move: RowMove, reason: Refusal) -> None:
    """L1, L7: out of range, not granted, named twice, of other sizes, or not landing memory at all."""
    with pytest.raises(PushRefused) as refused:
        pair.sender.push(pair.grant, [move])
    assert refused.value.reason is reason
    pair.assert_nothing_was_posted()


def test_rows_beyond_the_receivers_region(pair: Pair, process: ModuleType) -> None:
    """L1: a handle that grants what does not exist."""
    beyond = process.handle(pair.receiver.description, "t", (96,))
    with pytest.raises(PushRefused) as refused:
        pair.sender.push(beyond, [RowMove("pool", (1,), (96,))])
    assert refused.value.reason is Refusal.TARGET
    pair.assert_nothing_was_posted()


def test_checksums_that_cannot_be(pair: Pair, process: ModuleType, incarnation: Make) -> None:
    """L1: a kind that the receiver cannot verify."""
    poor = NixlTransferEngine(
        incarnation=incarnation(),
        layout_fingerprint=process.LAYOUT,
        model_fingerprint=process.MODEL,
        checksums=(ChecksumKind.LANES_64,),
    )
    try:
        poor.register(
            MemoryRegion("l", torch.zeros((8, process.ROW_BYTES), dtype=torch.uint8), RegionRole.LANDING_ROWS)
        )
        description = poor.describe()
        pair.sender.connect(description).result(30)
        with pytest.raises(PushRefused) as refused:
            pair.sender.push(process.handle(description, "t", (4, 5, 6)), [GOOD])
        assert refused.value.reason is Refusal.CHECKSUM
    finally:
        poor.close()


def test_each_landing_row_is_written_once(pair: Pair) -> None:
    """L1: a second write to a row of the same transfer could follow the checksum that described the first."""
    pair.sender.push(pair.grant, [RowMove("pool", (1,), (4,))]).wait(30)
    with pytest.raises(PushRefused) as refused:
        pair.sender.push(pair.grant, [RowMove("pool", (2, 3), (5, 4))])
    assert refused.value.reason is Refusal.CONFLICT
    pair.sender.push(pair.grant, [RowMove("pool", (2,), (5,))], last=True).wait(30)


def test_a_transfer_that_ended_takes_no_more(pair: Pair) -> None:
    """L7: after the terminal notice the receiver reuses the rows."""
    pair.sender.push(pair.grant, [RowMove("pool", (1,), (4,))], last=True).wait(30)
    with pytest.raises(PushRefused) as refused:
        pair.sender.push(pair.grant, [RowMove("pool", (2,), (5,))])
    assert refused.value.reason is Refusal.ENDED
    never = replace(pair.grant, transfer_id="never pushed")
    pair.sender.end(never, Outcome.FAILED).result(30)
    with pytest.raises(PushRefused) as refused:
        pair.sender.push(never, [GOOD])
    assert refused.value.reason is Refusal.ENDED


def test_two_handles_of_one_transfer_id(pair: Pair) -> None:
    """L1: ids are never reused; the attempt of the second differs."""
    pair.sender.push(pair.grant, [RowMove("pool", (1,), (4,))]).wait(30)
    with pytest.raises(PushRefused) as refused:
        pair.sender.push(replace(pair.grant, attempt=2), [RowMove("pool", (2,), (5,))])
    assert refused.value.reason is Refusal.CONFLICT
    pair.sender.end(pair.grant).result(30)


def test_a_pool_is_not_writable(pair: Pair) -> None:
    """L7: only landing regions are described to peers, and the wire's keys are of no other memory."""
    description = pair.sender.describe()
    assert description.regions == ()
    assert {region.role for region in pair.receiver.description.regions} == {
        RegionRole.LANDING_ROWS,
        RegionRole.LANDING_SLOTS,
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout_fingerprint": b"x" * 32}, Refusal.LAYOUT),
        ({"model_fingerprint": b"x" * 32}, Refusal.MODEL),
        ({"agent_metadata": b""}, Refusal.METADATA),
        ({"agent_metadata": b"HRE1\xff\xff\xff\xff"}, Refusal.METADATA),
        ({"regions": ()}, Refusal.METADATA),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_peers_that_do_not_fit(
    pair: Pair, make_receiver: Make, incarnation: Make, change: dict[str, Any], reason: Refusal
) -> None:
    """L14: refused at the handshake, with the reason; nothing is connected."""
    stranger: PeerDescription = make_receiver(incarnation()).description
    with pytest.raises(PeerRefused) as refused:
        pair.sender.connect(replace(stranger, **change)).result(30)
    assert refused.value.reason is reason
    assert pair.sender.stats().peers == 1


def test_a_forbidden_wire(process: ModuleType, make_receiver: Make, incarnation: Make) -> None:
    """The receiver can only be reached over TCP, which the sender's settings forbid: said, never fallen back to."""
    receiver = make_receiver(incarnation(), TransferSettings(allowed_transports=frozenset({"tcp"})))
    sender = NixlTransferEngine(
        incarnation=incarnation(),
        layout_fingerprint=process.LAYOUT,
        model_fingerprint=process.MODEL,
        settings=TransferSettings(allowed_transports=frozenset({"cma"})),
    )
    try:
        with pytest.raises(PeerRefused) as refused:
            sender.connect(receiver.description).result(30)
        assert refused.value.reason is Refusal.TRANSPORT
        with pytest.raises(PushRefused):
            sender.push(process.handle(receiver.description, "t", (1,)), [RowMove("pool", (1,), (1,))])
    finally:
        sender.close()


def test_a_rebuilt_landing_region_needs_its_new_description(pair: Pair, process: ModuleType) -> None:
    """L14: the old region's handles are refused once the new description is connected, and the other way round."""
    old = pair.receiver.description
    fresh = torch.zeros((8, process.ROW_BYTES), dtype=torch.uint8)
    pair.receiver.engine.register(MemoryRegion("landing 2", fresh, RegionRole.LANDING_ROWS, version=2))
    new = pair.receiver.engine.describe()
    assert new.metadata_version > old.metadata_version
    grant = replace(process.handle(new, "t2", (7,)), metadata_version=2)
    with pytest.raises(PushRefused) as refused:
        pair.sender.push(grant, [RowMove("pool", (1,), (7,))])
    assert refused.value.reason is Refusal.METADATA_VERSION
    pair.sender.connect(new).result(30)
    pair.sender.push(grant, [RowMove("pool", (1,), (7,))], last=True).wait(30)
    assert fresh[7].equal(process.pattern(1, 16, process.ROW_BYTES)[1])
    with pytest.raises(PushRefused) as refused:
        pair.sender.push(pair.grant, [GOOD])
    assert refused.value.reason is Refusal.METADATA_VERSION


def test_a_lost_peer_is_readmitted_by_a_new_handshake(pair: Pair) -> None:
    """L14: a broken connection is not held against a peer that lives; until then every push says so."""
    description = pair.receiver.description
    pair.sender._peers.mark_lost(description.incarnation, description.rank)
    with pytest.raises(PeerLost):
        pair.sender.push(pair.grant, [GOOD])
    both = [pair.sender.connect(description) for _ in range(2)]
    assert both[0].result(30) == both[1].result(30)
    pair.sender.push(pair.grant, [GOOD], last=True).wait(30)
    assert pair.receiver.landing[4:7].all()


def test_the_queue_is_bounded(pair: Pair) -> None:
    """L12: more than max_pushes at once are refused, and what was refused leaves no trace (L10)."""
    hold = Event()
    pair.sender._thread.inbox.put(lambda: hold.wait(30) or None)
    pushes = [pair.sender.push(pair.grant, [RowMove("pool", (1 + i,), (4 + i,))]) for i in range(2)]
    with pytest.raises(TransferBusy):
        pair.sender.push(pair.grant, [RowMove("pool", (3,), (6,))])
    hold.set()
    for push in pushes:
        push.wait(30)
    pair.sender.push(pair.grant, [RowMove("pool", (3,), (6,))], last=True).wait(30)
    assert pair.sender.stats().idle


def test_closed_engines_say_so(pair: Pair) -> None:
    pair.sender.close()
    pair.sender.close()
    with pytest.raises(EngineClosed):
        pair.sender.push(pair.grant, [GOOD])
    with pytest.raises(EngineClosed):
        pair.sender.connect(pair.receiver.description).result(30)
    with pytest.raises(EngineClosed):
        pair.sender.describe()
    with pytest.raises(EngineClosed):
        pair.sender.end(pair.grant)


def test_regions_are_checked() -> None:
    with pytest.raises(ValueError, match="uint8"):
        MemoryRegion("x", torch.zeros((2, 8), dtype=torch.float32))
    with pytest.raises(ValueError, match="contiguous"):
        MemoryRegion("x", torch.zeros((4, 8), dtype=torch.uint8)[:, ::2])
    with pytest.raises(ValueError, match="nothing"):
        MemoryRegion("x", torch.zeros((0, 8), dtype=torch.uint8))
