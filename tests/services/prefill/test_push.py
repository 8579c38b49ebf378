"""Prefill against a receiver that misbehaves: the test is decode, with a real landing region and transfer agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc.aio
import pytest
import pytest_asyncio
import torch

from headrace.kvcache.handle import ChecksumKind
from headrace.kvcache.landing import LandingRegion
from headrace.kvcache.landing_types import (
    ChecksumMismatch,
    LandingIdentity,
    NoticeResult,
    PartChecksums,
    PartRequest,
    PartTarget,
)
from headrace.kvcache.process import ProcessIdentity
from headrace.kvcache.transfer.nixl import NixlTransferEngine
from headrace.kvcache.transfer.pushes import Outcome
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole
from headrace.kvcache.transfer.wire import decode_envelope, encode_envelope
from headrace.services.runtime.errors import HeadraceError, Unavailable, from_rpc_error
from headrace.services.runtime.health import Health
from headrace.services.runtime.ids import new_incarnation
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.server import ServiceServer
from headrace.services.runtime.settings import ListenSettings
from headrace.services.worker.signing import UNSIGNED
from headrace.services.worker.transfer_wire import agent_to_wire, handle_from_wire, handle_to_wire
from headrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.services.cluster import PATIENCE_S, RPC, Cluster, WorkerProcess
from tests.services.driver import make_request, prompt_of_its_own, spec_of
from tests.services.tiny import BLOCK

pytestmark = pytest.mark.asyncio(loop_scope="session")
ROWS = 256


@dataclass
class Receiver(decode_pb2_grpc.DecodeServiceServicer):
    """Decode's side of a hand-over, with a place for misbehaviour before every commit is looked at."""

    prefill: WorkerProcess
    before_commit: Callable[[int, LandingRegion, tuple[int, ...]], None] = lambda count, landing, rows: None
    commits: list[decode_pb2.CommitRequest] = field(default_factory=list)
    ends: list[decode_pb2.EndTransferRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        replica = self.prefill.replica
        self.peer = common_pb2.PeerId(replica_id="decode-of-the-test", incarnation=new_incarnation())
        self.model = common_pb2.ModelIdentity(
            model_fingerprint=replica.model_fp, layout_fingerprint=replica.layout_fp, row_fingerprint=replica.row_fp
        )
        identity = LandingIdentity(self.peer.incarnation, replica.layout_fp, replica.model_fp, ChecksumKind.XXH3_64)
        self.row_bytes = 5376
        self.landing = LandingRegion(identity, row_bytes=self.row_bytes, slot_bytes=0, num_rows=ROWS, num_slots=0)
        self.rows = torch.zeros((ROWS, self.row_bytes), dtype=torch.uint8)
        self.transfer = NixlTransferEngine(
            incarnation=self.peer.incarnation,
            layout_fingerprint=replica.layout_fp,
            model_fingerprint=replica.model_fp,
        )
        self.transfer.register(MemoryRegion("landing", self.landing.rows, RegionRole.LANDING_ROWS))
        self.server = ServiceServer(ListenSettings(), RPC, Metrics(), Health())
        self.server.add(
            decode_pb2_grpc.add_DecodeServiceServicer_to_server,
            self,
            decode_pb2.DESCRIPTOR.services_by_name["DecodeService"],
        )

    def grant(self, spec: common_pb2.RequestSpec) -> prefill_pb2.DecodeTarget:
        blocks = tuple(range(-(-len(spec.token_ids) // BLOCK)))
        handle = self.landing.reserve(
            spec.id.request_id, spec.id.attempt, [PartRequest(None, blocks, with_slot=False)], deadline=1e12
        )
        self.transfer.expect(handle.transfer_id)
        return prefill_pb2.DecodeTarget(
            peer=self.peer,
            endpoint=self.server.address,
            agent=self.agent,
            landing=handle_to_wire(handle, self.peer.replica_id, 60.0, UNSIGNED),
        )

    @property
    def agent(self) -> common_pb2.TransferAgent:
        return agent_to_wire(self.transfer.describe(), self.peer.replica_id, self.model, UNSIGNED)

    async def Commit(
        self, request: decode_pb2.CommitRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> decode_pb2.CommitResponse:
        self.commits.append(request)
        handle = handle_from_wire(request.landing, "landing", UNSIGNED)
        self.landing.notice(handle.transfer_id, complete=True)
        self.before_commit(len(self.commits), self.landing, handle.landing_rows)
        sums = [PartChecksums(tuple(part.rows)) for part in request.checksums]
        targets = [PartTarget(part.blocks) for part in handle.parts]
        try:
            self.landing.take(handle, sums, targets, self.rows)
        except ChecksumMismatch as error:
            bad = [PartRequest(part.choice, part.blocks, with_slot=False) for part in error.bad]
            again = self.landing.reserve(handle.request_id, handle.attempt, bad, deadline=1e12)
            landing = handle_to_wire(again, self.peer.replica_id, 60.0, UNSIGNED)
            return decode_pb2.CommitResponse(resend=decode_pb2.CommitResend(landing=landing, agent=self.agent))
        return decode_pb2.CommitResponse(admitted=decode_pb2.CommitAdmitted())

    async def EndTransfer(
        self, request: decode_pb2.EndTransferRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> decode_pb2.EndTransferResponse:
        self.ends.append(request)
        self.landing.notice(request.landing.transfer_id, complete=False)
        return decode_pb2.EndTransferResponse()

    async def until_idle(self) -> None:
        """Every landing row is free: by commit, by notice over the wire, or by EndTransfer."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.landing.integrity().idle:
                for notice in self.transfer.take_notices():
                    self.landing.notice(notice.transfer_id, complete=notice.outcome is Outcome.OK)
                await asyncio.sleep(0.01)

    async def run(self, spec: common_pb2.RequestSpec, target: prefill_pb2.DecodeTarget) -> prefill_pb2.RunResponse:
        """The last message of a run."""
        last = prefill_pb2.RunResponse()
        async for response in self.call(spec, target):
            last = response
        return last

    def call(
        self, spec: common_pb2.RequestSpec, target: prefill_pb2.DecodeTarget
    ) -> AsyncIterator[prefill_pb2.RunResponse]:
        stub = prefill_pb2_grpc.PrefillServiceStub(self.prefill.channel)
        return stub.Run(prefill_pb2.RunRequest(spec=spec, target=target), timeout=PATIENCE_S)


@asynccontextmanager
async def receiving(prefill: WorkerProcess) -> AsyncIterator[Receiver]:
    one = Receiver(prefill)
    await one.server.start()
    try:
        yield one
    finally:
        await one.server.stop()
        one.transfer.close()


@pytest_asyncio.fixture(loop_scope="session")
async def receiver(v3_cluster: Cluster) -> AsyncIterator[Receiver]:
    """A receiver for the shared prefill; afterwards nothing is held at either end (L11)."""
    async with receiving(v3_cluster["prefill"]) as one:
        yield one
        await one.prefill.until_idle()
        await one.until_idle()  # prefill's last word may be on its way


def spec_for(receiver: Receiver, name: str, length: int, attempt: int = 1) -> common_pb2.RequestSpec:
    return spec_of(make_request(name, prompt_of_its_own(name, length)), receiver.prefill, attempt=attempt)


async def test_what_was_damaged_is_pushed_again(receiver: Receiver) -> None:
    """L1: the second push carries the damaged rows alone, and what arrives equals an undamaged run."""

    def damage(count: int, landing: LandingRegion, rows: tuple[int, ...]) -> None:
        if count == 1:
            landing.rows[rows[1], 7] ^= 1
            landing.rows[rows[3], 0] ^= 255

    receiver.before_commit = damage
    spec = spec_for(receiver, "damage", 75)
    last = await receiver.run(spec, receiver.grant(spec))
    assert last.HasField("handed_over"), last
    assert [len(commit.checksums[0].rows) for commit in receiver.commits] == [5, 2]
    report = last.handed_over.report
    assert report.kv_bytes == 7 * receiver.row_bytes
    assert report.resent_bytes == 2 * receiver.row_bytes
    assert report.transport == "cma"
    arrived = receiver.rows.clone()
    receiver.rows.zero_()
    again = spec_for(receiver, "damage", 75, attempt=2)
    assert (await receiver.run(again, receiver.grant(again))).HasField("handed_over")
    assert torch.equal(receiver.rows, arrived)


async def test_a_decode_that_died_is_no_misfit(receiver: Receiver) -> None:
    """L6, L14: prefill knows of the death before the router does; what it answers lets the request go elsewhere."""
    own = ProcessIdentity.own()
    dead = replace(own, start_ticks=own.start_ticks - 1)
    described = receiver.transfer.describe()
    metadata = encode_envelope(replace(decode_envelope(described.agent_metadata), process=dead))
    spec = spec_for(receiver, "dead", 40)
    target = receiver.grant(spec)
    described = replace(described, agent_metadata=metadata)
    target.agent.CopyFrom(agent_to_wire(described, receiver.peer.replica_id, receiver.model, UNSIGNED))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await receiver.run(spec, target)
    error = from_rpc_error(refused.value)
    assert isinstance(error, Unavailable), error
    assert "is gone" in str(error)


async def test_rows_that_never_match_end_the_run(receiver: Receiver) -> None:
    """L1, L6: boundedly often, then the run fails and decode is told that nothing more comes."""

    def damage(count: int, landing: LandingRegion, rows: tuple[int, ...]) -> None:
        landing.rows[rows[0], count] ^= 1

    receiver.before_commit = damage
    spec = spec_for(receiver, "hopeless", 40)
    last = await receiver.run(spec, receiver.grant(spec))
    assert last.failed.target_lost
    assert last.failed.error.code == common_pb2.ERROR_CODE_CORRUPT
    assert len(receiver.commits) == 3
    await receiver.until_idle()


async def test_a_commit_whose_answer_is_lost_is_repeated(receiver: Receiver) -> None:
    """A commit changes nothing the second time, so it may be asked for again."""

    def lose(count: int, landing: LandingRegion, rows: tuple[int, ...]) -> None:
        if count == 1:
            raise Unavailable("the answer is lost")

    receiver.before_commit = lose
    spec = spec_for(receiver, "lost-answer", 33)
    last = await receiver.run(spec, receiver.grant(spec))
    assert last.HasField("handed_over"), last
    assert receiver.commits[0].landing.transfer_id == receiver.commits[1].landing.transfer_id
    assert list(receiver.commits[0].checksums[0].rows) == list(receiver.commits[1].checksums[0].rows)


@pytest.mark.parametrize("stage", ["accepted", "progress"])
async def test_a_run_that_is_left_says_its_last_word(receiver: Receiver, stage: str) -> None:
    """L7: after the piece on the wire comes the terminal notice, and it says that the transfer is incomplete."""
    spec = spec_for(receiver, f"left-{stage}", 1500)
    target = receiver.grant(spec)
    call = receiver.call(spec, target)
    async for response in call:
        if response.WhichOneof("event") == stage:
            break
    call.cancel()  # type: ignore[attr-defined]
    await receiver.until_idle()
    assert not receiver.commits
    assert receiver.landing.notice(target.landing.transfer_id, complete=True) is NoticeResult.LATE


async def test_a_higher_attempt_overtakes_the_lower(receiver: Receiver) -> None:
    """L16: the lower run ends ABORTED, wherever it is; the higher one hands over."""
    lower = spec_for(receiver, "overtaken", 1500)
    higher = spec_for(receiver, "overtaken", 1500, attempt=2)
    first = receiver.call(lower, receiver.grant(lower))
    async for response in first:
        if response.HasField("accepted"):
            break
    assert (await receiver.run(higher, receiver.grant(higher))).HasField("handed_over")
    last = prefill_pb2.RunResponse()
    async for response in first:
        last = response
    assert last.failed.error.code == common_pb2.ERROR_CODE_ABORTED
    await receiver.until_idle()


async def refusal(call: AsyncIterator[prefill_pb2.RunResponse]) -> HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


def _other_model(target: prefill_pb2.DecodeTarget) -> None:
    target.agent.model.model_fingerprint = bytes(32)


def _truncated(target: prefill_pb2.DecodeTarget) -> None:
    del target.landing.parts[0].blocks[-1], target.landing.parts[0].rows[-1]


def _other_request(target: prefill_pb2.DecodeTarget) -> None:
    target.landing.id.request_id = "another"


def _other_size(target: prefill_pb2.DecodeTarget) -> None:
    target.landing.row_bytes += 256


def _other_life(target: prefill_pb2.DecodeTarget) -> None:
    target.agent.owner.incarnation = new_incarnation()


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (_other_model, "target.agent"),
        (_truncated, "target.landing.parts"),
        (_other_request, "target.landing.id"),
        (_other_size, "target.landing.row_bytes"),
        (_other_life, "target.peer"),
    ],
)
async def test_a_target_that_is_not_exact_is_refused(
    receiver: Receiver, damage: Callable[[prefill_pb2.DecodeTarget], None], field: str
) -> None:
    """L1, L10, L14: refused before anything is computed, and the receiver is told that its rows are unused."""
    spec = spec_for(receiver, f"inexact-{field}", 40)
    target = receiver.grant(spec)
    damage(target)
    error = await refusal(receiver.call(spec, target))
    assert error.field == field
    await receiver.until_idle()
    assert len(receiver.ends) == 1


async def test_a_draining_prefill_gives_the_grant_back(v3_mortal: Cluster) -> None:
    """L10, L19: a run that is refused while it drains still tells decode that nothing will be written."""
    worker = await v3_mortal.ensure("prefill")
    async with receiving(worker) as receiver:
        busy = spec_for(receiver, "busy", 1500)
        running = receiver.call(busy, receiver.grant(busy))
        async for response in running:
            if response.HasField("accepted"):
                break
        worker.process.terminate()
        error: HeadraceError | None = None
        attempt = 0
        while error is None:
            attempt += 1
            late = spec_for(receiver, "late", 20, attempt=attempt)
            try:
                await receiver.run(late, receiver.grant(late))
            except grpc.aio.AioRpcError as failed:
                error = from_rpc_error(failed)
        assert isinstance(error, Unavailable)
        last = prefill_pb2.RunResponse()
        async for response in running:
            last = response
        assert last.HasField("handed_over"), last
        await receiver.until_idle()
    assert await worker.stop() == 0
