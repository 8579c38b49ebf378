from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.store.retention.heat import Heat, rank_at, tick, ticks_of

NOW = 1.7e9
WRITTEN = tick(NOW - 1_000)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def prefix(blocks: int) -> list[tuple[bytes, int]]:
    return [(key(number), 128 * (number + 1)) for number in range(blocks)]


@given(st.floats(0, 4e9), st.integers(1, 1 << 26))
def test_ranks_fit_in_63_bits_and_tell_their_time(time_s: float, tokens: int) -> None:
    rank = rank_at(tick(time_s), tokens)
    assert 0 <= rank < 1 << 63
    assert ticks_of(rank) == tick(time_s)
    assert rank >= rank_at(tick(time_s))


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0, 1e6), st.booleans()), min_size=1, max_size=20))
def test_a_block_never_ranks_below_what_needs_it(uses: list[tuple[int, float, bool]]) -> None:
    """L4: plain order of rank never strands a suffix, whatever the clock and the age do between uses."""
    heat = Heat()
    for length, later, hit in uses:
        heat.horizon = max(heat.horizon, rank_at(tick(NOW + later / 2)))
        heat.touch(prefix(length), NOW + later, hit=hit)
        ranks = [heat.rank(each, WRITTEN) for each, _ in prefix(8)]
        assert ranks == sorted(ranks, reverse=True)


def test_a_use_ranks_half_an_age_above_a_write() -> None:
    heat = Heat()
    heat.horizon = rank_at(tick(NOW - 100))
    heat.touch(prefix(1), NOW)
    assert ticks_of(heat.rank(key(0), WRITTEN)) == tick(NOW + 50)
    again = Heat()
    again.horizon = rank_at(tick(NOW - 100))
    again.touch(prefix(1), NOW, hit=False)
    assert ticks_of(again.rank(key(0), WRITTEN)) == tick(NOW)


def test_what_was_not_used_ranks_by_its_segment() -> None:
    heat = Heat()
    assert heat.rank(key(0), WRITTEN) == rank_at(WRITTEN)
    assert heat.last_use(key(0), WRITTEN) == NOW - 1_000


def test_rank_and_last_use_go_along_when_an_entry_moves() -> None:
    heat = Heat()
    heat.touch(prefix(1), NOW + 10)
    rank = heat.rank(key(0), WRITTEN)
    heat.hold(key(0), WRITTEN)
    heat.hold(key(1), WRITTEN)
    later = tick(NOW + 5_000)
    assert heat.rank(key(0), later) == rank
    assert heat.last_use(key(0), later) == NOW + 10
    assert heat.rank(key(1), later) == rank_at(WRITTEN)


def test_memory_is_bounded_and_the_lowest_are_forgotten() -> None:
    """L12."""
    heat = Heat(limit=100)
    for number in range(1_000):
        heat.touch([(key(number), 128)], NOW + number)
        assert len(heat.remembered()) <= 100
    assert key(999) in heat.remembered()
    assert key(0) not in heat.remembered()
    heat.forget([key(999), key(0)])
    assert key(999) not in heat.remembered()
