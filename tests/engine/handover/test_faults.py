"""What goes wrong between two engines: bytes, handles, attempts, leases, cancels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.engine.decode import DecodeRole
from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.messages import (
    Cancel,
    Committed,
    FinishReason,
    Prefill,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    RebuildLanding,
    Renew,
    Reserve,
    RowsReady,
    SenderDied,
    Submit,
    TakeDrainedLandings,
    TransferEnded,
    Unpin,
)
from headrace.kvcache.landing_types import NoticeResult, OutOfLanding, PartRequest


def test_a_wrong_byte_is_sent_again(kit: Any, pair: Any) -> None:
    """L1: a row that does not match its checksum is granted anew, alone; the answer is right."""
    request = kit.request("x", 70)
    reserved = pair.reserve(request)
    events = pair.run_prefill(request, reserved)
    commit = pair.push(reserved, events)
    pair.landing.rows[reserved.handle.parts[0].rows[2], 3] ^= 1
    reply = pair.decode.apply(commit)
    assert reply.resend is not None
    assert [part.blocks for part in reply.resend.parts] == [(2,)]
    assert pair.decode.apply(pair.push(reserved, events, reply.resend)) == Committed()
    pair.finish_prefill(events)
    assert len(kit.collect(kit.run(pair.decode))["x"].tokens[0]) == 8
    pair.assert_idle()


def test_inexact_commits_are_refused(kit: Any, pair: Any) -> None:
    """L1, L4: another handle, missing first tokens, wrong counts: refused, and the reservation can still be used."""
    request = kit.request("x", 40)
    reserved = pair.reserve(request)
    events = pair.run_prefill(request, reserved)
    commit = pair.push(reserved, events)
    other = pair.reserve(kit.request("other", 40))
    wrong = [
        replace(commit, handle=other.handle),
        replace(commit, handle=replace(commit.handle, generation=99)),
        replace(commit, handle=replace(commit.handle, transfer_id="no such")),
        replace(commit, first=()),
        replace(commit, counts=replace(commit.counts, computed=1)),
    ]
    for bad in wrong:
        with pytest.raises(EngineError) as caught:
            pair.decode.apply(bad)
        assert caught.value.code is ErrorCode.FAILED_PRECONDITION
    assert pair.decode.apply(commit) == Committed()
    assert pair.decode.apply(commit) == Committed()
    pair.decode.apply(Cancel(other.key))
    pair.finish_prefill(events)
    assert len(kit.collect(kit.run(pair.decode))["x"].tokens[0]) == 8
    pair.assert_idle()


def test_reserve_is_idempotent_and_the_highest_attempt_wins(kit: Any, pair: Any) -> None:
    """L16, L23: the same answer for the same attempt; a higher one ends the lower; a lower one is ABORTED."""
    request = kit.request("r", 40)
    first = pair.reserve(request)
    assert pair.reserve(request) == first
    higher = replace(request, key=replace(request.key, attempt=2))
    second = pair.reserve(higher)
    assert set(second.handle.landing_rows).isdisjoint(first.handle.landing_rows)
    with pytest.raises(EngineError) as caught:
        pair.reserve(request)
    assert caught.value.code is ErrorCode.ABORTED
    ended = [event for event in pair.decode.drain_events() if event.key == request.key]
    assert [type(event).__name__ for event in ended] == ["Finished", "Usage"]
    assert pair.decode.integrity() == ()
    assert pair.decode.apply(TransferEnded(first.handle.transfer_id, complete=False)) is NoticeResult.RELEASED
    assert pair.decode.apply(Cancel(higher.key)) is True
    assert pair.decode.apply(TransferEnded(second.handle.transfer_id, complete=False)) is NoticeResult.RELEASED
    assert pair.decode.integrity(idle=True) == ()


def test_reservations_are_bounded_and_refused_typed(kit: Any, make_pair: Any) -> None:
    """L12, L10: never fits → NEVER_FITS; not now → RESOURCE_EXHAUSTED with a delay; refusals hold nothing."""
    pair = make_pair(rows=12)
    with pytest.raises(EngineError) as caught:
        pair.reserve(kit.request("huge", 150, max_tokens=100))
    assert caught.value.code is ErrorCode.NEVER_FITS
    pair.reserve(kit.request("a", 130, max_tokens=10))
    with pytest.raises(EngineError) as caught:
        pair.reserve(kit.request("b", 130, max_tokens=10))
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert caught.value.retry_after_s
    assert pair.decode.status().conservation.live == 1
    assert pair.decode.integrity() == ()


def test_a_lease_that_is_not_renewed_ends_the_reservation(kit: Any, pair: Any) -> None:
    """L8: renewed leases last, others end on the injected clock; rows a peer may write go to quarantine (L6, L7)."""
    request = kit.request("r", 40)
    reserved = pair.reserve(request)
    for _ in range(5):
        pair.clock.now += 4.0
        assert pair.decode.apply(Renew((request.key,))) == ()
        pair.decode.expire()
    assert pair.decode.next_expiry() == pair.clock.now + reserved.lease_s
    pair.clock.now += 5.0
    pair.decode.expire()
    outcome = kit.collect(list(pair.decode.drain_events()))["r"]
    assert outcome.finished[0].reason is FinishReason.CANCELLED
    assert pair.decode.apply(Renew((request.key,))) == (request.key,)
    assert pair.decode.status().quarantined_bytes > 0
    assert pair.decode.integrity() == ()
    assert pair.decode.integrity(idle=True) != ()
    events = pair.run_prefill(request, reserved)
    with pytest.raises(EngineError) as caught:
        pair.decode.apply(pair.push(reserved, events))
    assert caught.value.code is ErrorCode.NOT_FOUND
    pair.finish_prefill(events)
    pair.assert_idle()


def test_a_dead_sender_frees_its_landing_rows(kit: Any, pair: Any) -> None:
    """L6: quarantine ends when the sender's process is known dead."""
    request = kit.request("r", 40)
    pair.decode.apply(Reserve(request, sender="prefill-1"))
    assert pair.decode.apply(SenderDied("prefill-1")) == (request.key,)
    pair.decode.apply(Cancel(request.key))
    assert pair.decode.integrity(idle=True) == ()


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
def test_pinned_rows_outlive_a_cancelled_prefill(kit: Any, make_pair: Any, reason: FinishReason) -> None:
    """L7: cancel stops scheduling at once; rows under a transfer stay in place until Unpin, whoever needs memory."""
    pair = make_pair(prefill_rows=16)
    request = kit.request("r", 100, deadline=pair.clock.now + 10)
    pair.prefill.apply(Prefill(request))
    pair.prefill.step()
    pair.prefill.step()
    events = list(pair.prefill.drain_events())
    rows = [entry.row for event in events if isinstance(event, RowsReady) for entry in event.rows]
    assert rows
    before = pair.prefill.pool.rows[rows].clone()
    if reason is FinishReason.CANCELLED:
        pair.prefill.apply(Cancel(request.key))
    else:
        pair.clock.now += 10
        pair.prefill.expire()
    failed = pair.prefill.drain_events()
    assert [(type(event), event.reason) for event in failed] == [(PrefillFailed, reason)]
    for other in (kit.request("other", 150), kit.request("another", 150)):
        reserved = pair.reserve(other)
        events = pair.run_prefill(other, reserved)
        pair.finish_prefill(events)
        pair.decode.apply(Cancel(other.key))
        pair.decode.apply(TransferEnded(reserved.handle.transfer_id, complete=False))
    assert torch.equal(pair.prefill.pool.rows[rows], before)
    assert pair.prefill.integrity() == ()
    pair.prefill.apply(Unpin(request.key, tuple(rows)))
    with pytest.raises(EngineError) as caught:
        pair.prefill.apply(Unpin(request.key, tuple(rows)))
    assert caught.value.code is ErrorCode.NOT_FOUND


def test_decode_refuses_other_roles_commands(kit: Any, pair: Any) -> None:
    """A command for another role is refused, not ignored."""
    assert isinstance(pair.decode.role, DecodeRole)
    for engine, command in ((pair.decode, Prefill(kit.request("r", 4))), (pair.prefill, Submit(kit.request("r", 4)))):
        with pytest.raises(EngineError) as caught:
            engine.apply(command)
        assert caught.value.code is ErrorCode.FAILED_PRECONDITION


def test_a_landing_region_with_too_much_quarantine_is_replaced(kit: Any, pair: Any) -> None:
    """L6: a worker with too much quarantine says so; new grants come from a fresh region, the old memory stays until
    its last sender has spoken; a hand-over that was under way ends in the old one."""
    on_the_way = kit.request("on-the-way", 40)
    reserved = pair.reserve(on_the_way)
    lost = [pair.reserve(kit.request(f"lost{index}", 100)) for index in range(2)]
    for each in lost:
        pair.decode.apply(Cancel(each.key))
    assert not pair.decode.status().landing_sound
    fresh = pair.decode.apply(RebuildLanding())
    assert fresh.version == reserved.handle.metadata_version + 1
    assert pair.decode.status().landing_sound
    assert pair.decode.apply(TakeDrainedLandings()) == ()
    events = pair.run_prefill(on_the_way, reserved)
    assert pair.decode.apply(pair.push(reserved, events)) == Committed()
    pair.finish_prefill(events)
    old, pair.landing = pair.landing, fresh
    pair.serve(kit.request("later", 40))
    for each in lost:
        assert pair.decode.apply(TransferEnded(each.handle.transfer_id, complete=False)) is NoticeResult.RELEASED
    assert pair.decode.apply(TakeDrainedLandings()) == (old,)
    kit.run(pair.decode)
    pair.assert_idle()


def test_a_hand_over_that_is_given_up_has_one_terminal_event(kit: Any, pair: Any) -> None:
    """L28: PrefillDone was the terminal event; a cancel after it frees everything and says nothing more."""
    request = kit.request("r", 40)
    events = pair.run_prefill(request, pair.reserve(request))
    rows = [entry.row for event in events if isinstance(event, RowsReady) for entry in event.rows]
    done = next(event for event in events if isinstance(event, PrefillDone))
    assert pair.prefill.apply(Cancel(request.key)) is True
    assert pair.prefill.drain_events() == ()
    pair.prefill.apply(Unpin(request.key, (*rows, done.tail.row), slot=done.slot != 0))
    assert pair.prefill.integrity(idle=True) == ()
    assert pair.prefill.status().conservation.cancelled == 1


def test_a_preempted_prefill_names_each_row_once(kit: Any, make_pair: Any) -> None:
    """A prefill that lost its memory on the way is accepted once, names no block twice, and hands over right bytes."""
    pair = make_pair(prefill_rows=12, rows=40)
    first, second = kit.request("first", 70), kit.request("second", 70)
    reserved = {request.key: pair.reserve(request) for request in (first, second)}
    pair.prefill.apply(Prefill(first))
    pair.prefill.apply(Prefill(second))
    pair.prefill.step()
    pair.prefill.step()
    victim = pair.prefill.ledger.get(second.key).sequences[0]
    if victim in pair.prefill.scheduler.running:
        pair.prefill.scheduler.preempt(victim)
    events: list[Any] = []
    while not all(any(isinstance(e, PrefillDone) and e.key == key for e in events) for key in reserved):
        assert pair.prefill.step()
        events += pair.prefill.drain_events()
    whole = kit.engine(pair.prefill.model)
    for request in (first, second):
        own = [event for event in events if event.key == request.key]
        assert sum(isinstance(event, PrefillAccepted) for event in own) == 1
        blocks = [entry.block for event in own if isinstance(event, RowsReady) for entry in event.rows]
        assert blocks == [0, 1, 2, 3]
        assert pair.decode.apply(pair.push(reserved[request.key], own)) == Committed()
        pair.finish_prefill(own)
        whole.apply(Submit(request))
    got = kit.collect(kit.run(pair.decode))
    expected = kit.collect(kit.run(whole))
    assert {name: each.tokens for name, each in got.items()} == {name: each.tokens for name, each in expected.items()}
    pair.assert_idle()


def test_a_commit_that_breaks_half_way_ends_its_request(kit: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """L13, L10: whatever fails inside a commit ends that request, releases its memory, and nothing else."""
    request = kit.request("r", 40, n=2)
    reserved = pair.reserve(request)
    events = pair.run_prefill(request, reserved)
    monkeypatch.setattr(pair.decode.memory, "fork", lambda live: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pair.decode.apply(pair.push(reserved, events))
    outcome = kit.collect(list(pair.decode.drain_events()))["r"]
    assert [outcome.finished[choice].reason for choice in (0, 1)] == [FinishReason.ERROR] * 2
    pair.finish_prefill(events)
    pair.assert_idle()


def test_no_landing_rows_for_a_resend_is_overload(kit: Any, pair: Any) -> None:
    """L12: a resend that finds the landing region full is refused with a delay; the reservation ends as any other."""
    request = kit.request("r", 40)
    reserved = pair.reserve(request)
    events = pair.run_prefill(request, reserved)
    commit = pair.push(reserved, events)
    pair.landing.rows[reserved.handle.parts[0].rows[0], 0] ^= 1
    for row in range(pair.landing.rows.shape[0]):
        try:
            pair.landing.reserve(f"other{row}", 1, (PartRequest(None, (0,), False),), deadline=1e9)
        except OutOfLanding:
            break
    take = pair.landing.take

    def take_and_fill(*arguments: Any) -> None:
        try:
            take(*arguments)
        finally:
            blocks = tuple(range(len(reserved.handle.parts[0].rows)))
            pair.landing.reserve("last", 1, (PartRequest(None, blocks, False),), deadline=1e9)

    pair.landing.take = take_and_fill
    with pytest.raises(EngineError) as caught:
        pair.decode.apply(commit)
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert pair.decode.apply(Cancel(request.key)) is True
    assert pair.decode.status().conservation.live == 0
    assert pair.decode.integrity() == ()
