"""router.admission.first_tokens against a plain memory of all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.router.admission import FirstTokens

RECENT_S = 30.0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.integers(1, 20), st.integers(0, 50)), max_size=80))
def test_answers_as_if_nothing_had_been_left_out(steps: list[tuple[int, int, int, int]]) -> None:
    """L6: who waits in vain is told so early, by the fastest that was seen of late and by nothing older."""
    tokens, twin, now = FirstTokens(100, RECENT_S), [], 0.0
    for passed, cost, seconds, asked in steps:
        now += passed
        tokens.add(cost, float(seconds), now)
        twin.append((now, cost, float(seconds)))
        expected = min((took for at, of, took in twin if at >= now - RECENT_S and of <= asked), default=0.0)
        assert tokens.fastest_s(asked, now) == expected


def test_is_bounded_and_forgets() -> None:
    """L24 for what the desk remembers: slower and slower ones of fewer and fewer tokens all may still be an answer."""
    tokens = FirstTokens(10, RECENT_S)
    for number in range(100):
        tokens.add(100 - number, 1.0 + number, 0.0)
    assert len(tokens) == 10
    assert tokens.fastest_s(100, RECENT_S) == 91.0
    assert tokens.fastest_s(100, RECENT_S + 1) == 0.0
