from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.store.retention.classes import DAY, DEFAULT, NEVER
from headrace.kvcache.store.retention.heat import Heat, rank_at
from headrace.kvcache.store.retention.ledger import Ledger, Placed, SegmentUse
from headrace.kvcache.store.retention.pressure import Plan, Pressure, Quota, moved_bucket, segment_bytes

NOW = 1.7e9
SIZE = 100
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


class FakeStore:
    """Segments of keys and tenants; carries plans out as an engine does."""

    def __init__(self, quota: Quota, per_segment: int = 10) -> None:
        self.ledger = Ledger()
        self.heat = Heat()
        self.pressure = Pressure(quota)
        self.quota = quota
        self.place: dict[bytes, tuple[str, bytes]] = {}
        self.written = self.rewritten = 0
        self._per_segment = per_segment
        self._writing: dict[bool, tuple[str, int]] = {}
        self._opened = 0

    def put(self, key: bytes, tenant: bytes, now: float) -> bool:
        if not self.quota.admits(self.ledger, tenant, SIZE):
            return False
        segment = self._segment(moved=False)
        self.ledger.append(segment, tenant, SIZE, now)
        self.pressure.written(SIZE)
        self.written += 1
        self.place[key] = (segment, tenant)
        return True

    def use(self, keys: list[bytes], now: float) -> None:
        self.heat.touch([(key, 1 + at) for at, key in enumerate(keys)], now)

    def places(self, keys: Collection[bytes]) -> list[Placed]:
        return [Placed(key, *self.place[key], SIZE) for key in keys if key in self.place]

    def press(self) -> Plan | None:
        plan = self.pressure.plan(self.ledger, self.heat, self.places)
        if plan is None:
            return None
        for name in plan.prune:
            for key in [k for k, (segment, _) in self.place.items() if segment == name]:
                tenant = self.place[key][1]
                if self.heat.rank(key, self.ledger.segments[name].written) < plan.tenant_horizons.get(tenant, 0):
                    self.ledger.remove(name, tenant, SIZE)
                    self.heat.forget([key])
                    del self.place[key]
        moved = 0
        for name in plan.unlink:
            for key in [k for k, (segment, _) in self.place.items() if segment == name]:
                tenant = self.place[key][1]
                written = self.ledger.segments[name].written
                if plan.keeps(tenant, self.heat.rank(key, written)):
                    target = self._segment(moved=True)
                    self.heat.hold(key, written)
                    self.ledger.move(tenant, SIZE, name, target)
                    self.place[key] = (target, tenant)
                    self.pressure.rewritten(SIZE)
                    moved += SIZE
                else:
                    del self.place[key]
            self.ledger.unlink(name)
        assert moved == plan.rewritten_bytes
        self.rewritten += moved // SIZE
        assert list(self.ledger.problems()) == []
        return plan

    def _segment(self, *, moved: bool) -> str:
        name, held = self._writing.get(moved, ("", self._per_segment))
        if held >= self._per_segment:
            if name:
                self.ledger.seal(name)
            self._opened += 1
            name, held = f"s{self._opened}", 0
            self.ledger.add(SegmentUse(name))
        self._writing[moved] = (name, held + 1)
        return name


def key(number: int, tenant: bytes = A) -> bytes:
    return tenant + number.to_bytes(16, "big")


def test_nothing_under_the_high_mark() -> None:
    store = FakeStore(Quota(100 * SIZE))
    for number in range(90):
        assert store.put(key(number), A, NOW + number)
    assert store.press() is None


def test_the_least_used_segments_go_until_the_low_mark_and_what_was_used_stays() -> None:
    store = FakeStore(Quota(200 * SIZE))
    for number in range(181):
        store.put(key(number), A, NOW + number)
    store.use([key(number) for number in range(0, 12)], NOW + 500)
    plan = store.press()
    assert plan is not None
    assert store.ledger.disk_bytes <= 160 * SIZE
    assert all(key(number) in store.place for number in range(12))
    assert "s1" not in plan.unlink, "all of it was used"
    assert key(12) not in store.place
    assert plan.prune == ()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_bounds_under_random_use(data: st.DataObject) -> None:
    """Disk within its quota, write amplification within 1 + rewrite, the horizon never falls."""
    quota = Quota(100 * SIZE, rewrite=data.draw(st.sampled_from((0.0, 0.1, 0.3))))
    store = FakeStore(quota, per_segment=data.draw(st.integers(1, 12)))
    start_budget = quota.rewrite * quota.disk_bytes * (quota.high - quota.low) / SIZE
    horizon = 0
    chats = [[bytes([chat, at]) + bytes(30) for at in range(8)] for chat in range(40)]
    for step in range(data.draw(st.integers(20, 120))):
        now = NOW + 10 * step
        chat = data.draw(st.sampled_from(chats))
        lead = next((at for at, block in enumerate(chat) if block not in store.place), len(chat))
        store.use(chat[:lead], now)
        for block in chat[lead : data.draw(st.integers(lead, len(chat)))]:
            if block not in store.place:
                store.put(block, A, now)
            store.press()
            assert store.ledger.disk_bytes <= quota.high * quota.disk_bytes
        assert store.heat.horizon >= horizon
        horizon = store.heat.horizon
    assert store.rewritten <= quota.rewrite * store.written + start_budget
    assert store.ledger.disk_bytes <= quota.disk_bytes


def test_without_a_budget_nothing_is_written_again() -> None:
    store = FakeStore(Quota(100 * SIZE, rewrite=0.0), per_segment=5)
    for number in range(400):
        store.put(key(number), A, NOW + number)
        store.use([key(number)], NOW + number)
        store.press()
    assert store.rewritten == 0
    assert store.ledger.disk_bytes <= 90 * SIZE


def test_one_tenant_over_its_quota_costs_nobody_else() -> None:
    """L25: another tenant within its own quota loses nothing, however old and unused its entries are."""
    quota = Quota(1_000 * SIZE, tenants={A: 300 * SIZE, B: 300 * SIZE})
    store = FakeStore(quota)
    for number in range(200):
        store.put(key(number, B), B, NOW + number)
    for number in range(2_500):
        store.put(key(number, A), A, NOW + 1_000 + number)
        store.press()
        assert store.ledger.tenant_bytes[A] <= 300 * SIZE
    assert all(key(number, B) in store.place for number in range(200))
    held = [number for number in range(2_500) if key(number, A) in store.place]
    assert min(held) > 2_100, "the oldest of its own went"
    assert store.ledger.tenant_bytes[A] >= 230 * SIZE


def test_tenants_whose_quotas_fit_lose_nothing_even_where_their_entries_lie_among_others() -> None:
    """L25: every segment of the quiet tenant is half the greedy one's; freeing them costs as much as it frees."""
    quota = Quota(1_000 * SIZE, tenant_bytes=390 * SIZE)
    store = FakeStore(quota)
    for number in range(350):
        store.put(key(number, B), B, NOW + number)
        store.put(key(number, A), A, NOW + number)
    for number in range(350, 2_500):
        store.put(key(number, A), A, NOW + number)
        store.press()
        assert store.ledger.disk_bytes <= 900 * SIZE
    assert all(key(number, B) in store.place for number in range(350))
    assert store.rewritten <= store.written


def test_without_quotas_of_tenants_the_budget_holds() -> None:
    """The control of the test above: the same traffic, and the quiet one's entries go as the oldest."""
    store = FakeStore(Quota(1_000 * SIZE))
    for number in range(350):
        store.put(key(number, B), B, NOW + number)
        store.put(key(number, A), A, NOW + number)
    for number in range(350, 2_500):
        store.put(key(number, A), A, NOW + number)
        store.press()
    assert not any(key(number, B) in store.place for number in range(350))
    assert store.rewritten <= 0.3 * store.written + 30


def test_a_tenant_without_room_is_refused_and_its_entries_leave_the_index_at_once() -> None:
    store = FakeStore(Quota(1_000 * SIZE, tenant_bytes=100 * SIZE))
    for number in range(100):
        assert store.put(key(number), A, NOW + number)
    assert not store.put(key(100), A, NOW + 100)
    assert store.put(key(0, B), B, NOW + 100)
    plan = store.press()
    assert plan is not None
    assert plan.unlink == (), "the disk has room: no file goes"
    assert store.ledger.tenant_bytes[A] <= 80 * SIZE
    assert key(19) not in store.place
    assert key(99) in store.place
    assert store.put(key(100), A, NOW + 101)


def test_pinned_segments_never_go() -> None:
    store = FakeStore(Quota(100 * SIZE))
    store.ledger.add(SegmentUse("pinned", pinned=True))
    for _ in range(60):
        store.ledger.append("pinned", C, SIZE, NOW)
    store.ledger.seal("pinned")
    for number in range(300):
        store.put(key(number), A, NOW + number)
        store.press()
    assert "pinned" in store.ledger.segments
    assert store.ledger.disk_bytes <= 90 * SIZE


def test_being_moved_is_no_use() -> None:
    bucket = DEFAULT.bucket(RetentionClass.CHAT, NOW)
    assert moved_bucket(DEFAULT, RetentionClass.CHAT, bucket, NOW - DAY, NOW + 3 * DAY) == bucket
    assert moved_bucket(DEFAULT, RetentionClass.CHAT, bucket, NOW + 2 * DAY, NOW + 5 * DAY) == bucket + 2 * DAY
    assert moved_bucket(DEFAULT, RetentionClass.PINNED, NEVER, NOW, NOW) == NEVER


@given(st.floats(0, 7 * DAY), st.floats(0, 7 * DAY))
def test_moving_again_and_again_never_prolongs_a_life_by_more_than_an_eighth(use: float, step: float) -> None:
    bucket, last_use, now = DEFAULT.bucket(RetentionClass.CHAT, NOW), NOW + use, NOW + use
    end = max(bucket, DEFAULT.bucket(RetentionClass.CHAT, last_use))
    for _ in range(20):
        now += step / 20
        bucket = moved_bucket(DEFAULT, RetentionClass.CHAT, bucket, last_use, now)
        assert end <= bucket <= end + 7 * DAY // 8


def test_segments_suit_the_quota() -> None:
    assert segment_bytes(1 << 40) == 256 << 20
    assert segment_bytes(8 << 30) == 64 << 20
    assert segment_bytes(1 << 20) == 4 << 20


@pytest.mark.parametrize("marks", [{"low": 0.95}, {"keep": 0.8}, {"high": 1.1}, {"rewrite": -0.1}])
def test_impossible_marks_are_refused(marks: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        Quota(100, **marks)  # type: ignore[arg-type]


def test_a_plan_keeps_by_the_higher_of_both_horizons() -> None:
    plan = Plan(rank_at(10), {A: rank_at(20)}, (), (), 0)
    assert plan.keeps(B, rank_at(15))
    assert not plan.keeps(A, rank_at(15))
    assert plan.keeps(A, rank_at(20))
    assert not plan.keeps(B, rank_at(9))
