"""Who counts as a lessor, what a reader believes of an answer, and what a lessor refuses."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import pytest

from headrace.kvcache.entries import EntryInfo, EntryKind, RetentionClass, payload_digest
from headrace.kvcache.handle import PayloadKind
from headrace.kvcache.host.arena import arena_shape
from headrace.kvcache.host.leases import LeaseTable
from headrace.kvcache.host.peers import Arrival, Granted, PeerUnreachable, RemoteEntry
from headrace.kvcache.host.tier import HostTier
from headrace.kvcache.host.types import Pinned
from headrace.kvcache.memory import buffer_of, host_slabs
from headrace.kvcache.transfer.base import PeerDescription
from headrace.kvcache.transfer.errors import CopyRefused, PeerLost, Refusal, TransferBusy
from headrace.kvcache.transfer.regions import RegionDescription, RegionRole
from headrace.services.runtime.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from headrace.services.runtime.registry.base import Rank, Replica, Role, State
from headrace.services.runtime.registry.embedded import EmbeddedRegistry
from headrace.services.worker.channels import Channels
from headrace.services.worker.signing import UNSIGNED
from headrace.services.worker.tier import peer_wire
from headrace.services.worker.tier.peer_messages import MAX_KEYS, keys_from_wire, leased_from_wire, leased_to_wire
from headrace.services.worker.tier.peer_service import CachePeerServicer
from headrace.services.worker.tier.peer_wire import GrpcPeerWire, Lessors, Reader
from headrace.services.worker.transfer_wire import agent_from_wire, agent_to_wire
from headrace.v1 import cache_pb2, common_pb2

MODEL, LAYOUT = b"M" * 32, b"L" * 32
IDENTITY = common_pb2.ModelIdentity(model_fingerprint=MODEL, layout_fingerprint=LAYOUT)
OWN, OTHER = "0" * 31 + "1", "0" * 31 + "2"
BLOCK = 4096


def info(number: int, **more: Any) -> EntryInfo:
    payload = bytes([number]) * BLOCK
    plain = EntryInfo(
        bytes([number]) * 32,
        EntryKind.BLOCK,
        b"n" * 32,
        b"p" * 32,
        128,
        BLOCK,
        payload_digest(payload),
        RetentionClass.AGENT,
        b"t" * 16,
    )
    return replace(plain, **more)


def agent(incarnation: str, role: RegionRole = RegionRole.READABLE) -> PeerDescription:
    region = RegionDescription(PayloadKind.KV, role, 4096, BLOCK, 8, "cpu", 0)
    return PeerDescription(incarnation, 0, f"0.{incarnation}", b"metadata", 3, (region,), LAYOUT, MODEL)


def replica(**more: Any) -> Replica:
    plain = Replica(
        id="decode-1",
        incarnation=OTHER,
        role=Role.DECODE,
        data_centre="local",
        host="there",
        endpoint="127.0.0.1:1",
        state=State.READY,
        model_name="m",
        model_fp=MODEL,
        layout_fp=LAYOUT,
        ranks=(Rank(0, "cpu", agent_to_wire(agent(OTHER), "decode-1", IDENTITY, UNSIGNED).SerializeToString()),),
    )
    return replace(plain, **more)


@pytest.mark.parametrize("role", [RegionRole.READABLE, RegionRole.FETCHED, RegionRole.LANDING_ROWS])
def test_a_regions_use_survives_the_wire(role: RegionRole) -> None:
    wire = agent_to_wire(agent(OTHER, role), "r", IDENTITY, UNSIGNED)
    sent = common_pb2.TransferAgent.FromString(wire.SerializeToString())
    assert agent_from_wire(sent, "agent", UNSIGNED).regions[0].role is role
    wire.regions[0].use = 99  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match="use"):
        agent_from_wire(wire, "agent", UNSIGNED)


@pytest.mark.parametrize("retention", list(RetentionClass))
@pytest.mark.parametrize("kind", list(EntryKind))
def test_a_leased_entry_survives_the_wire(kind: EntryKind, retention: RetentionClass) -> None:
    described = info(1, kind=kind, retention=retention)
    wire = leased_to_wire(Pinned(described, 5, 8192, 77))
    assert leased_from_wire(cache_pb2.LeasedEntry.FromString(wire.SerializeToString())) == RemoteEntry(
        described, 8192, 77
    )


def test_an_entry_that_none_could_be_is_passed_over() -> None:
    """L13."""
    whole = leased_to_wire(Pinned(info(1), 5, 0, 1))
    for field, value in (
        ("key", b"short"),
        ("digest", b""),
        ("length", 0),
        ("kind", 9),
        ("tenant_tag", b"x"),
        ("tokens", 0),
    ):
        broken = cache_pb2.LeasedEntry()
        broken.CopyFrom(whole)
        setattr(broken, field, value)
        assert leased_from_wire(broken) is None, field


def test_keys_are_bounded_and_whole() -> None:
    """L12, L13."""
    assert keys_from_wire([b"k" * 32]) == [b"k" * 32]
    for keys in ([b"k" * 31], [b"k" * 32] * (MAX_KEYS + 1)):
        with pytest.raises(InvalidArgument, match="32 bytes"):
            keys_from_wire(keys)


async def test_only_workers_of_the_same_model_that_have_a_tier_are_lessors() -> None:
    """L14: same fingerprints, same data centre, up, with host memory to read; this host's first."""
    registry = EmbeddedRegistry()
    own = Reader(common_pb2.PeerId(replica_id="own", incarnation=OWN), IDENTITY, "local", "here", UNSIGNED)
    lessors = Lessors(own)
    following = asyncio.ensure_future(lessors.follow(registry))
    without_tier = agent_to_wire(agent(OTHER, RegionRole.LANDING_ROWS), "x", IDENTITY, UNSIGNED)
    no_tier = Rank(0, "cpu", without_tier.SerializeToString())
    strangers: list[dict[str, Any]] = [
        {"data_centre": "elsewhere"},
        {"model_name": "other", "model_fp": b"X" * 32},
        {"model_name": "other layout", "layout_fp": b"X" * 32},
        {"state": State.STARTING},
        {"state": State.UNREADY},
        {"ranks": ()},
        {"ranks": (Rank(0, "cpu", b"\xff\xff"),)},
        {"ranks": (no_tier,)},
        {"role": Role.ENCODER},
    ]
    for number, strange in enumerate(strangers):
        await registry.register(replica(id=f"s{number}", incarnation=f"{number + 16:032x}", **strange), 600.0)
    far = await registry.register(replica(), 600.0)
    await registry.register(replica(id="near", incarnation="f" * 32, host="here", role=Role.PREFILL), 600.0)
    await registry.register(replica(id="own", incarnation=OWN), 600.0)
    while len(lessors.order) < 2:  # noqa: ASYNC110 - bounded by the test's timeout
        await asyncio.sleep(0.001)
    assert lessors.order == ("f" * 32, OTHER)
    assert lessors.find(OTHER).endpoint == "127.0.0.1:1"
    await far.release()
    while OTHER in lessors.order:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    with pytest.raises(PeerUnreachable, match="left"):
        lessors.find(OTHER)
    following.cancel()


class FakeTransfer:
    """Of the engine, what Send uses."""

    def __init__(self) -> None:
        self.fails_with: Exception | None = None
        self.copies: list[Any] = []

    def connect(self, peer: PeerDescription) -> Future[str]:
        found: Future[str] = Future()
        if isinstance(self.fails_with, PeerLost):
            found.set_exception(self.fails_with)
        else:
            found.set_result("tcp")
        return found

    def copy(self, *arguments: Any, **more: Any) -> Any:
        if self.fails_with is not None:
            raise self.fails_with
        copy = type("Copy", (), {"terminal": Future()})()
        self.copies.append((arguments, copy))
        return copy


class Lessor:
    def __init__(self) -> None:
        shape = arena_shape(8 * BLOCK, BLOCK, 0)
        self.tier = HostTier(buffer_of(host_slabs(shape.slabs, shape.slab_bytes)), shape)
        for number in (1, 2):
            self.tier.put(info(number), bytes([number]) * BLOCK)
        self.leases = LeaseTable(self.tier, max_leases=2, max_bytes=1 << 20)
        self.transfer = FakeTransfer()
        self.servicer: Any = CachePeerServicer(self.tier, self.leases, self.transfer, UNSIGNED)  # type: ignore[arg-type]

    async def lease(self, *numbers: int, reader: str = OTHER) -> cache_pb2.LeaseResponse:
        request = cache_pb2.LeaseRequest(
            reader=common_pb2.PeerId(incarnation=reader), keys=[info(number).key for number in numbers], lease_ms=2000
        )
        answer: cache_pb2.LeaseResponse = await self.servicer.Lease(request, None)
        return answer

    def send(self, lease_id: str, number: int = 1, reader: str = OTHER) -> asyncio.Task[cache_pb2.SendResponse]:
        request = cache_pb2.SendRequest(
            lease_id=lease_id,
            reader=agent_to_wire(agent(reader, RegionRole.FETCHED), "r", IDENTITY, UNSIGNED),
            targets=[cache_pb2.SendTarget(key=info(number).key, offset=64)],
            time_left_ms=5000,
        )
        return asyncio.ensure_future(self.servicer.Send(request, None))


async def test_a_lease_needs_a_reader_and_room() -> None:
    """L12."""
    lessor = Lessor()
    with pytest.raises(InvalidArgument):
        await lessor.lease(1, reader="")
    assert not (await lessor.lease(9)).lease_id
    granted = [await lessor.lease(1, 2, 9), await lessor.lease(2)]
    assert [len(each.entries) for each in granted] == [2, 1]
    with pytest.raises(ResourceExhausted):
        await lessor.lease(1)
    release = cache_pb2.ReleaseRequest(reader=common_pb2.PeerId(incarnation=OTHER), lease_id=granted[0].lease_id)
    for _ in range(2):
        await lessor.servicer.Release(release, None)
    assert (lessor.leases.stats().live, lessor.leases.stats().released) == (1, 1)


async def test_a_send_that_begins_nothing_holds_nothing() -> None:
    """L10: refused with a typed error, which tells the reader that its buffer is quiet."""
    lessor = Lessor()
    granted = await lessor.lease(1)
    with pytest.raises(NotFound):
        await lessor.send("99")
    with pytest.raises(NotFound):
        await lessor.send(granted.lease_id, reader="another")
    with pytest.raises(InvalidArgument, match="leased"):
        await lessor.send(granted.lease_id, number=2)
    for failure, typed in (
        (PeerLost(OTHER, "gone"), FailedPrecondition),
        (CopyRefused(Refusal.TARGET, "outside"), FailedPrecondition),
        (TransferBusy("full"), ResourceExhausted),
    ):
        lessor.transfer.fails_with = failure
        with pytest.raises(typed):
            await lessor.send(granted.lease_id)
    assert lessor.leases.reader_died(OTHER) == 1
    assert lessor.tier.integrity().idle


async def test_a_send_pins_until_the_wire_is_quiet_whoever_still_listens() -> None:
    """L7: the caller leaves, its lease ends; what is on the wire stays in place."""
    lessor = Lessor()
    granted = await lessor.lease(1)
    sending = lessor.send(granted.lease_id)
    while not lessor.transfer.copies:  # noqa: ASYNC110
        await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    lessor.leases.reader_died(OTHER)
    assert lessor.leases.stats().sending == 1
    assert not lessor.tier.integrity().idle
    (_, _, (span,)), copy = lessor.transfer.copies[0]
    assert (span.remote, span.length) == (64, BLOCK)
    copy.terminal.set_result("done")
    assert lessor.leases.stats().sending == 0
    assert lessor.tier.integrity().idle


class SlowTransfer:
    """Connects when it is told to, over TCP."""

    def __init__(self) -> None:
        self.connecting: Future[None] = Future()
        self.asked = asyncio.Event()

    def wire_to(self, peer: str) -> str | None:
        return "tcp" if self.connecting.done() else None

    def connect(self, description: PeerDescription) -> Future[None]:
        self.asked.set()
        return self.connecting

    def describe(self) -> PeerDescription:
        return agent(OWN)


@pytest.mark.parametrize("told", ["it left", "it died"])
async def test_a_lessor_that_goes_while_it_is_connected_to_leaves_no_quarantine(told: str) -> None:
    """L7: nothing was asked of it, and nobody will say so again; both watches of the registry go their own pace."""
    own = Reader(common_pb2.PeerId(incarnation=OWN), IDENTITY, "local", "here", UNSIGNED)
    lessors, transfer = Lessors(own), SlowTransfer()
    lessors._members[OTHER] = (False, peer_wire.Lessor("127.0.0.1:1", agent(OTHER)))
    wire = GrpcPeerWire(own, lessors, transfer, cast(Channels, None))  # type: ignore[arg-type]
    arrivals = [Arrival(RemoteEntry(info(1), 0, 1), 0)]
    fetching = wire.fetch(OTHER, Granted("1", (arrivals[0].entry,)), arrivals, 60.0)
    await transfer.asked.wait()
    if told == "it left":
        lessors._members.clear()
    wire.lessor_died(OTHER)
    transfer.connecting.set_result(None)
    assert isinstance(await asyncio.to_thread(fetching.settled.exception, 60), PeerUnreachable)
    await asyncio.to_thread(fetching.terminal.result, 60)
    assert wire.unquiet == 0
