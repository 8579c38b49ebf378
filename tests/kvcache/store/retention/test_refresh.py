from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.store.retention.classes import DAY, DEFAULT, HOUR, NEVER
from headrace.kvcache.store.retention.refresh import Refresh, Refresher, UsedEntry, refreshed_class

AGENT, CHAT, PINNED = RetentionClass.AGENT, RetentionClass.CHAT, RetentionClass.PINNED
NOW = 1.7e9
CLASSES = st.sampled_from((AGENT, CHAT, PINNED))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_under_half_of_life_left_is_refreshed() -> None:
    assert refreshed_class(DEFAULT, CHAT, NOW + 3.5 * DAY, CHAT, NOW) is None
    assert refreshed_class(DEFAULT, CHAT, NOW + 3.5 * DAY - 1, CHAT, NOW) is CHAT
    assert refreshed_class(DEFAULT, AGENT, NOW + 1.5 * DAY - 1, AGENT, NOW) is AGENT


def test_a_longer_class_takes_the_entry_over_and_a_shorter_never_shortens() -> None:
    assert refreshed_class(DEFAULT, AGENT, NOW + 3 * DAY, CHAT, NOW) is CHAT
    assert refreshed_class(DEFAULT, CHAT, NOW + DAY, AGENT, NOW) is CHAT
    assert refreshed_class(DEFAULT, CHAT, NOW + 6 * DAY, AGENT, NOW) is None
    assert refreshed_class(DEFAULT, PINNED, NEVER, CHAT, NOW) is None


def test_the_expired_is_left() -> None:
    assert refreshed_class(DEFAULT, CHAT, NOW, CHAT, NOW) is None


@given(st.lists(st.tuples(CLASSES, st.floats(-1, 1)), max_size=20), CLASSES)
def test_after_a_use_every_entry_that_lives_has_half_its_life_left(
    entries: list[tuple[RetentionClass, float]], used_by: RetentionClass
) -> None:
    """The promise of the documentation: at least half its class's time after the last use."""
    used = [
        UsedEntry(key(n), c, NEVER if c is PINNED else NOW + left * DEFAULT.of[c].life_s)
        for n, (c, left) in enumerate(entries)
    ]
    batch = {refresh.key: refresh.retention for refresh in Refresher(DEFAULT).plan(used, used_by, NOW)}
    for entry in used:
        if entry.retention is not PINNED and entry.expires_at <= NOW:
            assert entry.key not in batch
            continue
        retention = batch.get(entry.key, entry.retention)
        assert entry.key not in batch or retention >= used_by
        end = DEFAULT.bucket(retention, NOW) if entry.key in batch else entry.expires_at
        assert end == NEVER or end - NOW >= DEFAULT.of[retention].life_s / 2
        assert end == NEVER or end >= entry.expires_at


def test_a_prefix_is_one_batch_in_order_with_its_snapshot() -> None:
    used = [UsedEntry(key(n), CHAT, NOW + DAY) for n in range(5)]
    assert Refresher(DEFAULT).plan(used, CHAT, NOW) == tuple(Refresh(key(n), CHAT) for n in range(5))


def test_in_flight_once_unless_a_longer_class_comes() -> None:
    refresher = Refresher(DEFAULT)
    used = [UsedEntry(key(1), AGENT, NOW + HOUR)]
    first = refresher.plan(used, AGENT, NOW)
    assert refresher.plan(used, AGENT, NOW) == ()
    second = refresher.plan(used, CHAT, NOW)
    assert second == (Refresh(key(1), CHAT),)
    assert refresher.plan(used, AGENT, NOW) == ()
    refresher.done(first)
    assert refresher.in_flight == 1
    refresher.done(second)
    assert refresher.in_flight == 0
    assert refresher.plan(used, AGENT, NOW) == first
