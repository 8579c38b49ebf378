"""L7: free, send, abort, death, expiry and late notices in any order; real bytes, senders that write when they like."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kvcache.checksum import checksums
from headrace.kvcache.handle import ChecksumKind, Handle, HandleRejected
from headrace.kvcache.landing import (
    LandingIdentity,
    LandingRegion,
    NoticeResult,
    NotQuiet,
    OutOfLanding,
    PartChecksums,
    PartRequest,
    PartTarget,
    StaleAttempt,
    UnknownTransfer,
)

ROWS, SLOTS, BYTES = 6, 2, 8


@dataclass
class Sent:
    """What the outside world knows of one transfer, independent of the region's own records."""

    handle: Handle
    sender: str
    value: int
    may_write: bool = True
    """The sender lives and has not said its last word: its write may land at any moment, deadline or not."""
    waited_for: bool = True
    complete: bool = False


class Senders(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        identity = LandingIdentity("i" * 32, b"l" * 32, b"m" * 32, ChecksumKind.XXH3_64)
        self.region = LandingRegion(identity, row_bytes=BYTES, slot_bytes=BYTES, num_rows=ROWS, num_slots=SLOTS)
        self.now = 0.0
        self.value = 0
        self.sent: list[Sent] = []
        self.deadlines: dict[str, float] = {}
        self.generation_of_sender = dict.fromkeys("pq", 0)

    def any_sent(self, data: st.DataObject) -> Sent:
        return data.draw(st.sampled_from(self.sent))

    def write(self, sent: Sent) -> None:
        for row in sent.handle.landing_rows:
            self.region.rows[row] = sent.value
        for slot in sent.handle.landing_slots:
            self.region.slots[slot] = sent.value

    @rule(
        request=st.sampled_from("ab"),
        attempt=st.integers(1, 3),
        count=st.integers(0, 3),
        slot=st.booleans(),
        sender=st.sampled_from("pq"),
        wait=st.integers(1, 5),
    )
    def reserve(self, request: str, attempt: int, count: int, slot: bool, sender: str, wait: int) -> None:
        incarnation = f"{sender}{self.generation_of_sender[sender]}"
        mine = [each for each in self.sent if each.handle.request_id == request and (each.waited_for or each.may_write)]
        if any(each.waited_for and each.handle.attempt == attempt for each in mine):
            return  # idempotent repeats have their own test
        parts = [PartRequest(None, tuple(range(count)), slot)]
        if any(each.handle.attempt > attempt for each in mine):
            with pytest.raises(StaleAttempt):
                self.region.reserve(request, attempt, parts, deadline=self.now + wait, sender=incarnation)
            return
        try:
            handle = self.region.reserve(request, attempt, parts, deadline=self.now + wait, sender=incarnation)
        except OutOfLanding:
            report = self.region.integrity()
            assert count > report.rows.free or slot > report.slots.free
            return
        assert handle.transfer_id not in {each.handle.transfer_id for each in self.sent}
        for each in mine:
            self.stop_waiting(each)
        self.value = self.value % 250 + 1
        self.deadlines[handle.transfer_id] = self.now + wait
        self.sent.append(Sent(handle, incarnation, self.value))

    def stop_waiting(self, sent: Sent) -> None:
        sent.waited_for = False
        sent.complete = False

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def stray_write(self, data: st.DataObject) -> None:
        """A posted write lands: before or after deadline, abort, or a newer attempt."""
        sent = self.any_sent(data)
        if sent.may_write:
            self.write(sent)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), complete=st.booleans())
    def last_word(self, data: st.DataObject, complete: bool) -> None:
        sent = self.any_sent(data)
        if sent.may_write and complete:
            self.write(sent)
        result = self.region.notice(sent.handle.transfer_id, complete=complete)
        if not sent.may_write:
            assert result is (NoticeResult.REPEATED if sent.complete else NoticeResult.LATE)
            return
        sent.may_write = False
        if not sent.waited_for:
            assert result is NoticeResult.RELEASED
        elif complete:
            assert result is NoticeResult.READY
            sent.complete = True
        else:
            assert result is NoticeResult.FAILED
            sent.waited_for = False

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        sent = self.any_sent(data)
        handle = sent.handle
        (part,) = handle.parts
        rows = torch.zeros((ROWS, BYTES), dtype=torch.uint8)
        slots = torch.zeros((SLOTS, BYTES), dtype=torch.uint8)
        (row_sum,) = checksums(torch.full((1, BYTES), sent.value, dtype=torch.uint8), [0], ChecksumKind.XXH3_64)
        sums = [PartChecksums((row_sum,) * len(part.rows), None if part.slot is None else row_sum)]
        targets = [PartTarget(tuple(range(len(part.rows))), None if part.slot is None else 1)]
        if not (sent.waited_for or sent.may_write):
            with pytest.raises(UnknownTransfer):
                self.region.take(handle, sums, targets, rows, slots)
            return
        with pytest.raises(HandleRejected):
            self.region.take(replace(handle, attempt=handle.attempt + 1), sums, targets, rows, slots)
        if not sent.complete:
            with pytest.raises(NotQuiet):
                self.region.take(handle, sums, targets, rows, slots)
            return
        self.region.take(handle, sums, targets, rows, slots)
        assert (rows[: len(part.rows)] == sent.value).all(), "a taken transfer has its sender's bytes, whole"
        assert part.slot is None or (slots[1] == sent.value).all()
        self.stop_waiting(sent)

    @rule(request=st.sampled_from("ab"), attempt=st.integers(0, 3))
    def abort(self, request: str, attempt: int) -> None:
        ended = [
            each
            for each in self.sent
            if each.waited_for and each.handle.request_id == request and each.handle.attempt <= attempt
        ]
        assert self.region.abort(request, attempt) == len(ended)
        for each in ended:
            self.stop_waiting(each)

    @rule(passed=st.integers(1, 3))
    def time_passes(self, passed: int) -> None:
        self.now += passed
        ended = [each for each in self.sent if each.waited_for and self.deadlines[each.handle.transfer_id] <= self.now]
        assert set(self.region.expire(self.now)) == {each.handle for each in ended}
        for each in ended:
            self.stop_waiting(each)

    @rule(sender=st.sampled_from("pq"))
    def death(self, sender: str) -> None:
        incarnation = f"{sender}{self.generation_of_sender[sender]}"
        self.generation_of_sender[sender] += 1
        dead = [each for each in self.sent if each.sender == incarnation and each.may_write]
        lost = {each.handle for each in dead if each.waited_for}
        assert set(self.region.sender_died(incarnation)) == lost
        for each in dead:
            each.may_write = False
            each.waited_for = False

    @invariant()
    def nothing_writable_is_free_or_anothers(self) -> None:
        """L6, L7, L11."""
        report = self.region.integrity()
        assert report.problems == ()
        in_use = [each for each in self.sent if each.may_write or each.waited_for]
        rows = [row for each in in_use for row in each.handle.landing_rows]
        slots = [slot for each in in_use for slot in each.handle.landing_slots]
        assert len(set(rows)) == len(rows)
        assert len(set(slots)) == len(slots)
        assert report.rows.free == ROWS - len(rows), "free exactly when the wire is quiet and nobody waits"
        assert report.slots.free == SLOTS - len(slots)
        quarantined = [each for each in in_use if not each.waited_for]
        assert report.rows.quarantined == sum(len(each.handle.landing_rows) for each in quarantined)
        assert report.transfers == len(in_use)
        assert report.idle == (not in_use)

    def teardown(self) -> None:
        """L11: when every sender has spoken or died and every wait has ended, all is free."""
        self.time_passes(1000)
        for sender in "pq":
            self.death(sender)
        assert self.region.integrity().idle


TestSenders = Senders.TestCase
TestSenders.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
