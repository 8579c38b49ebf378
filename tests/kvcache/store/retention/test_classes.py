from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.store.retention.classes import (
    DAY,
    DEFAULT,
    DEFAULT_LIVES,
    HOUR,
    NEVER,
    Life,
    Lives,
    expired,
    longer,
)

MORTAL = (RetentionClass.AGENT, RetentionClass.CHAT)
TIMES = st.floats(1.6e9, 2.2e9)


@given(TIMES, st.sampled_from(MORTAL))
def test_an_entry_lives_its_class_and_less_than_a_bucket_more(now: float, retention: RetentionClass) -> None:
    life = DEFAULT_LIVES[retention]
    end = DEFAULT.bucket(retention, now)
    assert end % life.bucket_s == 0
    assert life.life_s <= end - now < life.life_s + life.bucket_s
    assert not expired(end, now + life.life_s - 1)
    assert expired(end, end)


def test_the_lives_of_the_description() -> None:
    assert DEFAULT_LIVES[RetentionClass.AGENT] == Life(3 * DAY, HOUR)
    assert DEFAULT_LIVES[RetentionClass.CHAT] == Life(7 * DAY, 4 * HOUR)
    assert DEFAULT.bucket(RetentionClass.PINNED, 1.7e9) == NEVER
    assert not expired(NEVER, 9e9)


def test_a_bucket_holds_what_was_written_within_its_width() -> None:
    start = 1_700_006_400.0 - 1_700_006_400.0 % (4 * HOUR)
    first = DEFAULT.bucket(RetentionClass.CHAT, start + 1)
    assert DEFAULT.bucket(RetentionClass.CHAT, start + 4 * HOUR) == first
    assert DEFAULT.bucket(RetentionClass.CHAT, start + 4 * HOUR + 1) == first + 4 * HOUR


def test_the_longer_class() -> None:
    assert longer(RetentionClass.AGENT, RetentionClass.CHAT) is RetentionClass.CHAT
    assert longer(RetentionClass.PINNED, RetentionClass.CHAT) is RetentionClass.PINNED


@pytest.mark.parametrize(("life", "bucket"), [(-1, 1), (10, 11), (10, 0)])
def test_impossible_lives_are_refused(life: int, bucket: int) -> None:
    with pytest.raises(ValueError, match="bucket"):
        Life(life, bucket)


def test_classes_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="grow"):
        Lives({**DEFAULT_LIVES, RetentionClass.AGENT: Life(8 * DAY, HOUR)})
    with pytest.raises(ValueError, match="needed"):
        Lives({RetentionClass.AGENT: Life(DAY, HOUR)})
