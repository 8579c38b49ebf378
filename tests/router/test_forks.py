"""Forks against a twin that keeps every prompt whole."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.forks import Forks

PROMPTS = st.lists(st.text("ab", min_size=0, max_size=7), max_size=14)


def keys_of(blocks: str, salt: str = "") -> tuple[bytes, ...]:
    """A chain: each key depends on all letters before it."""
    return tuple(hashlib.sha256(f"{salt}/{blocks[: end + 1]}".encode()).digest() for end in range(len(blocks)))


def common(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def twin(earlier: list[str], prompt: str, least: int) -> int:
    """The longest common prefix with an earlier prompt, where both go on behind it."""
    shared = max((common(prompt, other) for other in earlier), default=0)
    others_go_on = any(common(prompt, other) == shared < len(other) for other in earlier)
    return shared if least <= shared < len(prompt) and others_go_on else 0


@given(PROMPTS, st.integers(1, 3))
def test_forks_are_those_of_whole_prompts(prompts: list[str], least: int) -> None:
    forks = Forks(10_000, least)
    for index, prompt in enumerate(prompts):
        assert forks.visit(keys_of(prompt)) == twin(prompts[:index], prompt, least)


@given(PROMPTS, st.integers(0, 6))
def test_memory_is_bounded_and_a_chain_is_forgotten_from_its_end(prompts: list[str], most: int) -> None:
    """L24 for what the router remembers; whatever is forgotten, a fork is told only where two prompts really part."""
    forks = Forks(most, 1)
    for index, prompt in enumerate(prompts):
        told = forks.visit(keys_of(prompt))
        assert len(forks) <= most
        if told:
            assert any(common(prompt, other) >= told for other in prompts[:index])
    kept = forks.visit(keys_of("ab" * 20))
    assert kept <= most


def test_a_conversation_is_no_fork() -> None:
    """Each turn extends the last one: the snapshots at its end serve the next."""
    forks = Forks(100)
    assert [forks.visit(keys_of("abababab"[:end])) for end in (3, 5, 8)] == [0, 0, 0]
    assert forks.visit(keys_of("abababab")) == 0, "the same prompt again"


def test_a_shared_system_prompt_is_one() -> None:
    forks = Forks(100)
    assert forks.visit(keys_of("ssssx1")) == 0
    assert forks.visit(keys_of("ssssy2")) == 4
    assert forks.visit(keys_of("ssssz3")) == 4
    assert forks.visit(keys_of("sz")) == 0, "too short to be worth a snapshot"


def test_tenants_chains_never_meet() -> None:
    """L25: keys are salted."""
    forks = Forks(100)
    forks.visit(keys_of("ssssx1", "one tenant"))
    assert forks.visit(keys_of("ssssy2", "another")) == 0


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="min_blocks"):
        Forks(10, 0)
