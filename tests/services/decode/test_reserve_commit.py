"""Reservations and hand-overs at decode. The test itself is the sender, with a transfer agent of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import grpc.aio
import pytest
import torch

from headrace.kvcache.handle import Handle
from headrace.kvcache.transfer.base import TransferSettings
from headrace.kvcache.transfer.nixl import NixlTransferEngine
from headrace.kvcache.transfer.pushes import Outcome, RowMove
from headrace.kvcache.transfer.regions import MemoryRegion
from headrace.services.runtime.errors import (
    Aborted,
    FailedPrecondition,
    HeadraceError,
    Incompatible,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    from_rpc_error,
)
from headrace.services.runtime.ids import new_incarnation
from headrace.services.worker.signing import UNSIGNED
from headrace.services.worker.transfer_wire import agent_from_wire, checksums_to_wire, handle_from_wire
from headrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2
from tests.services.cluster import PATIENCE_S
from tests.services.driver import Driver, make_request, prompt_of, spec_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass
class Sender:
    """Rows of zeros: what they mean does not matter here, only whether they arrive as they were sent."""

    driver: Driver
    peer: common_pb2.PeerId
    engine: NixlTransferEngine
    rows: torch.Tensor

    async def push(self, wire: common_pb2.TransferHandle, agent: common_pb2.TransferAgent) -> list[int]:
        """Write every row of the grant; their checksums."""
        handle = handle_from_wire(wire, "landing", UNSIGNED)
        await asyncio.wrap_future(self.engine.connect(agent_from_wire(agent, "agent", UNSIGNED)))
        count = len(handle.landing_rows)
        pushed = self.engine.push(handle, [RowMove("rows", tuple(range(count)), handle.landing_rows)], last=True)
        return list((await pushed).checksums[0])

    async def commit(
        self,
        wire: common_pb2.TransferHandle,
        sums: list[int],
        *,
        prompt_tokens: int,
        first: int = 5,
    ) -> decode_pb2.CommitResponse:
        request = decode_pb2.CommitRequest(
            landing=wire,
            sender=self.peer,
            checksums=[checksums_to_wire(sums)],
            first_tokens=[decode_pb2.FirstToken(choice=0, token_id=first)],
            report=prefill_pb2.PrefillReport(computed_tokens=prompt_tokens),
        )
        return await stub(self.driver).Commit(request, timeout=PATIENCE_S)

    async def end(self, wire: common_pb2.TransferHandle) -> None:
        await stub(self.driver).EndTransfer(
            decode_pb2.EndTransferRequest(landing=wire, sender=self.peer, outcome=decode_pb2.TRANSFER_OUTCOME_QUIET),
            timeout=PATIENCE_S,
        )


def stub(driver: Driver) -> decode_pb2_grpc.DecodeServiceAsyncStub:
    return decode_pb2_grpc.DecodeServiceStub(driver.decode.channel)


@pytest.fixture
def sender(v3: Driver) -> Iterator[Sender]:
    peer = common_pb2.PeerId(replica_id="prefill-of-the-test", incarnation=new_incarnation())
    replica = v3.decode.replica
    engine = NixlTransferEngine(
        incarnation=peer.incarnation,
        layout_fingerprint=replica.layout_fp,
        model_fingerprint=replica.model_fp,
        settings=TransferSettings(),
    )
    agent = common_pb2.TransferAgent.FromString(replica.ranks[0].agent)
    rows = torch.zeros((16, agent.regions[0].item_bytes), dtype=torch.uint8)
    engine.register(MemoryRegion("rows", rows))
    yield Sender(v3, peer, engine, rows)
    engine.close()


async def refused(call: object) -> HeadraceError:
    """The typed error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return from_rpc_error(caught.value)


async def pools(driver: Driver) -> dict[str, tuple[int, int]]:
    """(used, quarantined) of each pool at decode."""
    return {pool.name: (pool.used, pool.quarantined) for pool in (await driver.decode.status()).pools}


async def test_a_repeated_reservation_is_the_same(v3: Driver, sender: Sender) -> None:
    """L23: idempotent by (request, attempt); one grant, one set of rows."""
    spec = spec_of(make_request("twice", prompt_of("twice", 40)), v3.decode)
    first, second = await v3.reserve(spec), await v3.reserve(spec)
    first.landing.time_left_ms = second.landing.time_left_ms = 0
    assert first.landing == second.landing
    assert (await pools(v3))["landing_rows"] == (3, 0)
    await sender.end(first.landing)
    assert await v3.release(spec.id)
    assert not await v3.release(spec.id)


async def test_the_highest_attempt_wins(v3: Driver, sender: Sender) -> None:
    """L16: a higher attempt replaces the lower, which ends CANCELLED; lower ones are then refused with ABORTED."""
    request = make_request("attempts", prompt_of("attempts", 40))
    lower, higher = spec_of(request, v3.decode), spec_of(request, v3.decode, attempt=2)
    granted = await v3.reserve(lower)
    newer = await v3.reserve(higher)
    assert newer.landing.transfer_id != granted.landing.transfer_id
    assert set(newer.landing.parts[0].rows).isdisjoint(granted.landing.parts[0].rows)
    v3.stream.keep(lower.id)
    answer = await v3.stream.complete(lower.id)
    assert answer.finished[0].reason == common_pb2.FINISH_REASON_CANCELLED
    assert isinstance(await refused(v3.reserve(lower)), Aborted)
    assert (await pools(v3))["landing_rows"] == (3, 3)  # the lower attempt's rows may still be written
    await sender.end(granted.landing)
    await v3.release(higher.id)
    await sender.end(newer.landing)


async def test_room_is_bounded(v3: Driver) -> None:
    """L12: never fits and not now are told apart; nothing is held by either."""
    huge = make_request("huge", prompt_of("huge", 2000), max_tokens=48, n=8)
    many = make_request("many", prompt_of("many", 20), n=9)
    assert isinstance(await refused(v3.reserve(spec_of(many, v3.decode))), InvalidArgument)
    specs = [spec_of(make_request(f"room{i}", prompt_of(f"room{i}", 17), n=4), v3.decode) for i in range(2)]
    held = [await v3.reserve(spec) for spec in specs]
    error = await refused(v3.reserve(spec_of(huge, v3.decode)))
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after_s
    for spec, grant in zip(specs, held, strict=True):
        await v3.release(spec.id)
        await stub(v3).EndTransfer(
            decode_pb2.EndTransferRequest(landing=grant.landing, outcome=decode_pb2.TRANSFER_OUTCOME_QUIET)
        )


async def test_what_is_not_served_is_refused_by_name(v3: Driver) -> None:
    """L10, L14: unknown model, wrong counts, unimplemented fields: typed, with the field, and nothing held."""
    good = spec_of(make_request("refused", prompt_of("refused", 20)), v3.decode)

    def changed(**fields: object) -> common_pb2.RequestSpec:
        spec = common_pb2.RequestSpec()
        spec.CopyFrom(good)
        for name, value in fields.items():
            if hasattr(value, "DESCRIPTOR"):
                getattr(spec, name).CopyFrom(value)
            else:
                setattr(spec, name, value)
        return spec

    other = common_pb2.ModelIdentity(model_fingerprint=bytes(32), layout_fingerprint=good.model.layout_fingerprint)
    assert isinstance(await refused(v3.reserve(changed(model=other))), Incompatible)
    error = await refused(v3.reserve(changed(constraint=common_pb2.Constraint(json_object=True))))
    assert isinstance(error, InvalidArgument)
    assert error.field == "spec.constraint"
    error = await refused(v3.reserve(changed(constraint=common_pb2.Constraint(regex="(?=a)a"))))
    assert isinstance(error, InvalidArgument)
    assert error.field == "constraint"
    assert "Lookahead" in error.message
    assert (await refused(v3.reserve(changed(prompt_tokens=19)))).field == "spec.prompt_tokens"
    assert (await refused(v3.reserve(changed(router=common_pb2.PeerId())))).field == "spec.router"
    assert isinstance(await refused(v3.reserve(changed(root_key=b"short"))), InvalidArgument)
    assert (await v3.decode.status()).requests.refused >= 5


async def test_a_handle_that_is_not_exact_is_refused(v3: Driver, sender: Sender) -> None:
    """L1: stale, foreign, truncated and swapped handles; then the exact one is admitted all the same."""
    request = make_request("exact", prompt_of("exact", 40), max_tokens=3)
    spec = spec_of(request, v3.decode)
    grant = await v3.reserve(spec)
    v3.stream.keep(spec.id, credit=1)  # so that it lives until the repeat
    sums = await sender.push(grant.landing, grant.agent)

    def changed(**fields: object) -> common_pb2.TransferHandle:
        handle = common_pb2.TransferHandle()
        handle.CopyFrom(grant.landing)
        for name, value in fields.items():
            setattr(handle, name, value)
        return handle

    truncated = changed()
    del truncated.parts[0].blocks[-1], truncated.parts[0].rows[-1]
    swapped = changed()
    swapped.parts[0].rows[0], swapped.parts[0].rows[1] = grant.landing.parts[0].rows[1], grant.landing.parts[0].rows[0]
    foreign = changed()
    foreign.receiver.incarnation = new_incarnation()
    other = changed()
    other.id.request_id = "somebody else"
    for wrong in (
        truncated,
        swapped,
        foreign,
        changed(generation=grant.landing.generation + 1),
        changed(transfer_id=grant.landing.transfer_id + "0"),
        changed(layout_fingerprint=bytes(32)),
        changed(model_fingerprint=bytes(32)),
        changed(metadata_version=7),
        changed(rank=1),
    ):
        error = await refused(sender.commit(wrong, sums, prompt_tokens=40))
        assert isinstance(error, FailedPrecondition), wrong
    assert isinstance(await refused(sender.commit(other, sums, prompt_tokens=40)), NotFound)
    assert isinstance(await refused(sender.commit(grant.landing, sums, prompt_tokens=39)), FailedPrecondition)
    assert isinstance(await refused(sender.commit(grant.landing, sums[:-1], prompt_tokens=40)), FailedPrecondition)
    assert (await sender.commit(grant.landing, sums, prompt_tokens=40)).HasField("admitted")
    assert (await sender.commit(grant.landing, sums, prompt_tokens=40)).HasField("admitted"), "a repeat changes nothing"
    v3.stream.keep(spec.id)
    answer = await v3.stream.complete(spec.id)
    assert answer.tokens[0][0] == 5
    assert len(answer.tokens[0]) == 3


async def test_a_damaged_row_is_sent_again_alone(v3: Driver, sender: Sender) -> None:
    """L1: a row that does not match its checksum never reaches a request; a new grant covers it alone."""
    request = make_request("damaged", prompt_of("damaged", 70), max_tokens=3)
    spec = spec_of(request, v3.decode)
    grant = await v3.reserve(spec)
    v3.stream.keep(spec.id)
    sums = await sender.push(grant.landing, grant.agent)
    damaged = [*sums[:2], sums[2] ^ 1, *sums[3:]]
    response = await sender.commit(grant.landing, damaged, prompt_tokens=70)
    resend = response.resend.landing
    assert list(resend.parts[0].blocks) == [2]
    assert resend.transfer_id != grant.landing.transfer_id
    assert resend.generation > grant.landing.generation
    # The old grant is over: no commit and no notice of it changes anything any more.
    assert isinstance(await refused(sender.commit(grant.landing, sums, prompt_tokens=70)), FailedPrecondition)
    again = await sender.push(resend, response.resend.agent)
    assert (await sender.commit(resend, again, prompt_tokens=70)).HasField("admitted")
    answer = await v3.stream.complete(spec.id)
    assert len(answer.tokens[0]) == 3


async def test_rows_wait_for_the_last_word(v3: Driver, sender: Sender) -> None:
    """L6, L7: a released reservation's rows are quarantined until their sender says that the wire is quiet."""
    spec = spec_of(make_request("quiet", prompt_of("quiet", 40)), v3.decode)
    grant = await v3.reserve(spec)
    await v3.release(spec.id)
    assert (await pools(v3))["landing_rows"] == (0, 3)
    assert isinstance(await refused(sender.commit(grant.landing, [0, 0, 0], prompt_tokens=40)), NotFound)
    spec = spec_of(make_request("loud", prompt_of("loud", 40)), v3.decode)
    grant = await v3.reserve(spec)
    await asyncio.wrap_future(sender.engine.connect(agent_from_wire(grant.agent, "agent", UNSIGNED)))
    handle: Handle = handle_from_wire(grant.landing, "landing", UNSIGNED)
    await v3.release(spec.id)
    await asyncio.wrap_future(sender.engine.end(handle, Outcome.FAILED))  # over the wire, not by RPC
    await v3.decode.until_idle()


async def test_a_commit_that_comes_too_late_is_not_found(v3: Driver, sender: Sender) -> None:
    """L8: a lease that nobody renews ends; its rows are free once their sender is known to be quiet."""
    spec = spec_of(make_request("late", prompt_of("late", 20)), v3.decode, time_left_s=1.5)
    grant = await v3.reserve(spec)
    v3.stream.keep(spec.id)
    answer = await v3.stream.complete(spec.id)
    assert answer.finished[0].reason == common_pb2.FINISH_REASON_DEADLINE
    assert isinstance(await refused(sender.commit(grant.landing, [0, 0], prompt_tokens=20)), NotFound)
