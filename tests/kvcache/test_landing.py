"""The landing region: exact handles (L1), quarantine (L6), free exactly once after the wire is quiet (L7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.kvcache.checksum import checksums
from headrace.kvcache.handle import ChecksumKind, Handle, HandleMismatch, HandleRejected, LandingPart, PayloadKind
from headrace.kvcache.landing import (
    ChecksumMismatch,
    LandingError,
    LandingIdentity,
    LandingRegion,
    NoticeResult,
    NotQuiet,
    OutOfLanding,
    PartChecksums,
    PartRequest,
    PartTarget,
    RegionClosed,
    ReservationConflict,
    StaleAttempt,
    TransferState,
    UnknownTransfer,
)

ROW, SLOT = 16, 8
ONE = [PartRequest(None, (0, 1), with_slot=False), PartRequest(0, (2,), with_slot=True)]


def region_of(rows: int = 6, slots: int = 2, kind: ChecksumKind = ChecksumKind.XXH3_64, **more: Any) -> LandingRegion:
    identity = LandingIdentity("i" * 32, b"l" * 32, b"m" * 32, kind)
    return LandingRegion(identity, row_bytes=ROW, slot_bytes=SLOT, num_rows=rows, num_slots=slots, **more)


def write(region: LandingRegion, handle: Handle, value: int) -> list[PartChecksums]:
    """The sender's push: fills every granted row and slot, returns the checksums of what was sent."""
    sums = []
    for part in handle.parts:
        for position, row in enumerate(part.rows):
            region.rows[row] = value + position
        if part.slot is not None:
            region.slots[part.slot] = value
        slot = None if part.slot is None else checksums(region.slots, [part.slot], handle.checksum_kind)[0]
        sums.append(PartChecksums(checksums(region.rows, part.rows, handle.checksum_kind), slot))
    return sums


def take(region: LandingRegion, handle: Handle, sums: Sequence[PartChecksums]) -> tuple[torch.Tensor, torch.Tensor]:
    """Take into fresh memory, rows in order."""
    rows = torch.zeros((len(handle.landing_rows), ROW), dtype=torch.uint8)
    slots = torch.zeros((len(handle.landing_slots), SLOT), dtype=torch.uint8)
    targets, row, slot = [], 0, 0
    for part in handle.parts:
        place = None if part.slot is None else slot
        targets.append(PartTarget(tuple(range(row, row + len(part.rows))), place))
        row += len(part.rows)
        slot += part.slot is not None
    region.take(handle, sums, targets, rows, slots)
    return rows, slots


def assert_idle(region: LandingRegion) -> None:
    report = region.integrity()
    assert report.problems == ()
    assert report.idle
    assert report.rows.free == report.rows.capacity
    assert report.slots.free == report.slots.capacity


@pytest.mark.parametrize("kind", list(ChecksumKind))
def test_the_way_of_a_transfer(kind: ChecksumKind) -> None:
    region = region_of(kind=kind)
    handle = region.reserve("r", 1, ONE, deadline=10.0, sender="p")
    assert handle.parts == (LandingPart(None, (0, 1), (0, 1), None), LandingPart(0, (2,), (2,), 0))
    sums = write(region, handle, 5)
    with pytest.raises(NotQuiet):
        take(region, handle, sums)
    assert region.notice(handle.transfer_id, complete=True) is NoticeResult.READY
    assert region.notice(handle.transfer_id, complete=True) is NoticeResult.REPEATED
    rows, slots = take(region, handle, sums)
    assert rows[:, 0].tolist() == [5, 6, 5]
    assert slots[:, 0].tolist() == [5]
    assert_idle(region)
    with pytest.raises(UnknownTransfer):
        take(region, handle, sums)


def test_rows_and_slots_are_one_region() -> None:
    region = region_of()
    assert region.bytes.numel() == 6 * ROW + 2 * SLOT
    region.bytes.fill_(3)
    assert (region.rows == 3).all()
    assert (region.slots == 3).all()
    no_slots = LandingRegion(region.identity, row_bytes=ROW, slot_bytes=0, num_rows=2, num_slots=4)
    assert no_slots.slots.shape == (0, 0)
    assert no_slots.integrity().slots.capacity == 0


WRONG: dict[str, tuple[dict[str, Any], HandleMismatch]] = {
    "wrong request": ({"request_id": "other"}, HandleMismatch.REQUEST),
    "older attempt": ({"attempt": 0}, HandleMismatch.ATTEMPT),
    "restarted receiver": ({"incarnation": "j" * 32}, HandleMismatch.INCARNATION),
    "reused rows": ({"generation": 0}, HandleMismatch.GENERATION),
    "foreign layout": ({"layout_fingerprint": b"x" * 32}, HandleMismatch.LAYOUT),
    "foreign model": ({"model_fingerprint": b"x" * 32}, HandleMismatch.MODEL),
    "truncated": ({"parts": (LandingPart(None, (0,), (0,), None),)}, HandleMismatch.PARTS),
    "out of range": ({"parts": (LandingPart(None, (0, 1), (0, 99), None),)}, HandleMismatch.PARTS),
    "other checksum": ({"checksum_kind": ChecksumKind.LANES_64}, HandleMismatch.CHECKSUM_KIND),
    "embeddings": ({"payload": PayloadKind.EMBEDDING}, HandleMismatch.PAYLOAD),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_inexact_handle_is_discarded_and_disturbs_nothing(name: str) -> None:
    """L1: stale, reused, out-of-range, wrong-request and truncated handles."""
    change, reason = WRONG[name]
    region = region_of()
    handle = region.reserve("r", 1, ONE, deadline=10.0)
    sums = write(region, handle, 1)
    region.notice(handle.transfer_id, complete=True)
    with pytest.raises(HandleRejected) as caught:
        take(region, replace(handle, **change), sums)
    assert caught.value.reasons == (reason,)
    assert region.state(handle.transfer_id) is TransferState.QUIET
    take(region, handle, sums)
    assert_idle(region)


def test_a_stale_transfer_id_is_unknown() -> None:
    """L1: a handle over rows that another transfer has by now never reaches them."""
    region = region_of()
    old = region.reserve("r", 1, ONE, deadline=10.0)
    region.notice(old.transfer_id, complete=False)
    new = region.reserve("r", 1, ONE, deadline=10.0)
    assert new.landing_rows == old.landing_rows
    assert new.generation > old.generation
    region.notice(new.transfer_id, complete=True)
    with pytest.raises(UnknownTransfer):
        take(region, old, write(region, old, 1))
    with pytest.raises(HandleRejected):
        take(region, replace(old, transfer_id=new.transfer_id), [])


@pytest.mark.parametrize("kind", list(ChecksumKind))
def test_a_spoilt_row_is_named_and_can_be_resent(kind: ChecksumKind) -> None:
    """L1, L7: a frozen sender that wakes late spoils a transfer, which is resent; never a running request."""
    region = region_of(kind=kind)
    handle = region.reserve("r", 1, ONE, deadline=10.0)
    sums = write(region, handle, 1)
    region.notice(handle.transfer_id, complete=True)
    region.rows[handle.parts[0].rows[1], 3] ^= 1
    region.slots[0, 0] ^= 1
    with pytest.raises(ChecksumMismatch) as caught:
        take(region, handle, sums)
    assert caught.value.bad == (LandingPart(None, (1,), (1,), None), LandingPart(0, (), (), 0))
    again = region.reserve(
        "r",
        1,
        [PartRequest(part.choice, part.blocks, part.slot is not None) for part in caught.value.bad],
        deadline=10.0,
    )
    assert again.transfer_id != handle.transfer_id
    sums = write(region, again, 7)
    region.notice(again.transfer_id, complete=True)
    assert take(region, again, sums)[0][:, 0].tolist() == [7]
    assert_idle(region)


def test_the_copy_is_verified_not_the_landing_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """L3: bytes that change between check and copy cannot slip through, because the check comes after the copy."""
    region = region_of()
    handle = region.reserve("r", 1, [PartRequest(None, (0,), with_slot=False)], deadline=1.0)
    sums = write(region, handle, 1)
    region.notice(handle.transfer_id, complete=True)

    def racing(*arguments: Any) -> tuple[int, ...]:
        region.rows[0] = 99
        return checksums(*arguments)

    monkeypatch.setattr("headrace.kvcache.landing_copy.checksums", racing)
    assert take(region, handle, sums)[0][0, 0] == 1


def test_truncated_checksums_are_refused() -> None:
    """L1: fewer checksums, targets or parts than the handle has."""
    region = region_of()
    handle = region.reserve("r", 1, ONE, deadline=10.0)
    sums = write(region, handle, 1)
    region.notice(handle.transfer_id, complete=True)
    rows = torch.zeros((3, ROW), dtype=torch.uint8)
    slots = torch.zeros((1, SLOT), dtype=torch.uint8)
    targets = [PartTarget((0, 1)), PartTarget((2,), 0)]
    for bad_sums, bad_targets, bad_slots in (
        (sums[:1], targets, slots),
        (sums, targets[:1], slots),
        ([replace(sums[0], rows=sums[0].rows[:1]), sums[1]], targets, slots),
        (sums, [PartTarget((0,)), targets[1]], slots),
        ([sums[0], replace(sums[1], slot=None)], targets, slots),
        ([replace(sums[0], slot=5), sums[1]], targets, slots),
        (sums, [targets[0], PartTarget((2,))], slots),
        (sums, targets, None),
    ):
        with pytest.raises(LandingError):
            region.take(handle, bad_sums, bad_targets, rows, bad_slots)
        assert rows.count_nonzero() == 0, "nothing is copied before the shape is right"
    region.take(handle, sums, targets, rows, slots)


def test_a_deadline_ends_the_wait_not_the_rows() -> None:
    """L6: expired rows are neither free nor readable until the sender's terminal notice; it is recognised when late."""
    region = region_of()
    handle = region.reserve("r", 1, ONE, deadline=10.0)
    assert region.expire(9.9) == ()
    assert region.expire(10.0) == (handle,)
    assert region.expire(99.0) == ()
    report = region.integrity()
    assert (report.rows.quarantined, report.slots.quarantined, report.rows.free) == (3, 1, 3)
    assert region.state(handle.transfer_id) is TransferState.QUARANTINED
    with pytest.raises(NotQuiet):
        take(region, handle, write(region, handle, 1))
    with pytest.raises(UnknownTransfer):
        region.renew(handle.transfer_id, 50.0)
    other = region.reserve("s", 1, ONE, deadline=99.0)
    assert not set(other.landing_rows) & set(handle.landing_rows)
    with pytest.raises(OutOfLanding):
        region.reserve("t", 1, ONE, deadline=99.0)
    assert region.notice(handle.transfer_id, complete=True) is NoticeResult.RELEASED
    assert region.notice(handle.transfer_id, complete=True) is NoticeResult.LATE
    assert region.late_notices == 1
    region.notice(other.transfer_id, complete=False)
    assert_idle(region)


def test_renewal_moves_the_deadline() -> None:
    region = region_of()
    handle = region.reserve("r", 1, ONE, deadline=10.0)
    region.renew(handle.transfer_id, 20.0)
    assert region.expire(15.0) == ()
    assert region.reserve("r", 1, ONE, deadline=30.0) == handle
    assert region.expire(25.0) == ()
    assert region.expire(30.0) == (handle,)


def test_a_complete_transfer_that_nobody_takes_expires_to_free() -> None:
    region = region_of()
    handle = region.reserve("r", 1, ONE, deadline=10.0)
    region.notice(handle.transfer_id, complete=True)
    assert region.expire(10.0) == (handle,)
    assert_idle(region)


def test_abort_quarantines_open_rows() -> None:
    """L7: abort ends the wait at once and frees when the transfer is terminal; it is idempotent."""
    region = region_of()
    first = region.reserve("r", 1, ONE, deadline=10.0)
    assert region.abort("r", 0) == 0
    assert region.abort("r", 1) == 1
    assert region.abort("r", 1) == 0
    assert region.integrity().rows.quarantined == 3
    quiet = region.reserve("s", 1, ONE, deadline=10.0)
    region.notice(quiet.transfer_id, complete=True)
    assert region.abort("s", 5) == 1
    assert region.state(quiet.transfer_id) is None
    region.notice(first.transfer_id, complete=False)
    assert_idle(region)


def test_death_frees_what_the_dead_might_have_written() -> None:
    """L6: known death, not silence. Complete data of a dead sender is still good."""
    region = region_of(rows=9, slots=3)
    waiting = region.reserve("a", 1, ONE, deadline=10.0, sender="p1")
    expired = region.reserve("b", 1, ONE, deadline=1.0, sender="p1")
    complete = region.reserve("c", 1, ONE, deadline=10.0, sender="p1")
    sums = write(region, complete, 3)
    region.notice(complete.transfer_id, complete=True)
    region.expire(1.0)
    assert region.sender_died("p2") == ()
    assert region.sender_died("p1") == (waiting,)
    assert region.state(expired.transfer_id) is None
    assert region.integrity().rows.free == 6
    take(region, complete, sums)
    assert_idle(region)


def test_a_grant_for_a_sender_that_is_dead_already_waits_for_nobody() -> None:
    """L6: it died between its choice and the grant, so its death is told no more; in a rebuilt region, too."""
    region = region_of()
    assert region.sender_died("p") == ()
    region.reserve("a", 1, ONE, deadline=10.0, sender="p")
    region.abort("a", 1)
    assert_idle(region)
    fresh = region.rebuild()
    fresh.reserve("b", 1, ONE, deadline=10.0, sender="p")
    fresh.abort("b", 1)
    assert_idle(fresh)


def test_a_sender_may_be_bound_later_and_once() -> None:
    region = region_of()
    handle = region.reserve("a", 1, ONE, deadline=10.0)
    assert region.sender_died("p") == ()
    region.bind_sender(handle.transfer_id, "p")
    region.bind_sender(handle.transfer_id, "p")
    with pytest.raises(LandingError, match="bound to sender"):
        region.bind_sender(handle.transfer_id, "q")
    with pytest.raises(UnknownTransfer):
        region.bind_sender("nothing", "q")
    assert region.sender_died("p") == (handle,)


def test_reserve_is_idempotent_and_the_highest_attempt_wins() -> None:
    """L16 and the idempotence of Reserve by (request, attempt)."""
    region = region_of()
    first = region.reserve("r", 1, ONE, deadline=10.0, sender="p")
    assert region.reserve("r", 1, ONE, deadline=5.0) == first
    assert region.reserve("r", 1, ONE, deadline=5.0, sender="p") == first
    with pytest.raises(ReservationConflict):
        region.reserve("r", 1, ONE[:1], deadline=10.0)
    with pytest.raises(ReservationConflict):
        region.reserve("r", 1, ONE, deadline=10.0, sender="q")
    second = region.reserve("r", 2, ONE, deadline=10.0)
    assert region.state(first.transfer_id) is TransferState.QUARANTINED
    assert not set(first.landing_rows) & set(second.landing_rows)
    with pytest.raises(StaleAttempt):
        region.reserve("r", 1, ONE, deadline=10.0)
    region.notice(second.transfer_id, complete=True)
    assert region.reserve("r", 2, ONE, deadline=10.0) == second


def test_a_refused_higher_attempt_leaves_the_lower_one_alone() -> None:
    region = region_of(rows=3)
    first = region.reserve("r", 1, ONE, deadline=10.0)
    with pytest.raises(OutOfLanding):
        region.reserve("r", 2, ONE, deadline=10.0)
    assert region.state(first.transfer_id) is TransferState.OPEN


def test_rows_are_granted_side_by_side_where_possible() -> None:
    """One piece on the wire instead of one descriptor per row."""
    region = region_of(rows=8, slots=0)

    def grant(request: str, count: int) -> Handle:
        return region.reserve(request, 1, [PartRequest(None, tuple(range(count)), with_slot=False)], deadline=1.0)

    a, b, c = grant("a", 2), grant("b", 1), grant("c", 2)
    assert (a.landing_rows, b.landing_rows, c.landing_rows) == ((0, 1), (2,), (3, 4))
    region.notice(b.transfer_id, complete=False)
    assert grant("d", 3).landing_rows == (5, 6, 7)
    region.notice(a.transfer_id, complete=False)
    region.notice(c.transfer_id, complete=False)
    assert grant("e", 1).landing_rows == (0,)
    assert grant("f", 4).landing_rows == (1, 2, 3, 4)


def test_too_much_quarantine_asks_for_a_rebuild() -> None:
    """spec/protocol.md: the worker turns unready and rebuilds; the old memory stays until its writers are quiet."""
    region = region_of(quarantine_limit=0.5)
    first = region.reserve("r", 1, ONE, deadline=1.0)
    region.expire(1.0)
    assert region.quarantined_bytes == 3 * ROW + SLOT
    assert not region.too_much_quarantine
    second = region.reserve("s", 1, ONE, deadline=2.0)
    assert not region.too_much_quarantine
    region.expire(2.0)
    assert region.too_much_quarantine
    fresh = region.rebuild()
    with pytest.raises(RegionClosed):
        region.reserve("t", 1, ONE, deadline=3.0)
    handle = fresh.reserve("t", 1, ONE, deadline=3.0)
    assert handle.metadata_version == 2
    assert handle.transfer_id not in (first.transfer_id, second.transfer_id)
    assert not fresh.too_much_quarantine
    assert not region.drained
    region.notice(first.transfer_id, complete=False)
    region.notice(second.transfer_id, complete=False)
    assert region.drained
    assert_idle(region)


def test_integrity_sees_damage() -> None:
    """L11: leaked, doubled and impossible rows, and misfiled transfers."""

    def problems(damage: str) -> tuple[str, ...]:
        region: Any = region_of()
        handle = region.reserve("r", 1, ONE, deadline=1.0)
        match damage:
            case "lost":
                region._row_units.free.remove(5)
            case "free and granted":
                region._row_units.free.add(handle.landing_rows[0])
            case "impossible":
                region._slot_units.free.add(9)
            case "misfiled":
                region._transfers["x"] = region._transfers.pop(handle.transfer_id)
        return region.integrity().problems  # type: ignore[no-any-return]

    assert problems("none") == ()
    for damage in ("lost", "free and granted", "impossible", "misfiled"):
        assert problems(damage)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(LandingError):
        region_of(rows=0)
    with pytest.raises(LandingError):
        region_of(quarantine_limit=0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_same_code_lands_on_a_device() -> None:
    region = region_of(kind=ChecksumKind.LANES_64, device="cuda")
    handle = region.reserve("r", 1, ONE, deadline=10.0)
    sums = write(region, handle, 5)
    region.notice(handle.transfer_id, complete=True)
    rows = torch.zeros((4, ROW), dtype=torch.uint8, device="cuda")
    slots = torch.zeros((2, SLOT), dtype=torch.uint8, device="cuda")
    region.take(handle, sums, [PartTarget((3, 1)), PartTarget((0,), 1)], rows, slots)
    assert rows[:, 0].tolist() == [5, 6, 0, 5]
    assert slots[:, 0].tolist() == [0, 5]
