"""router.balancers.conditional: small uncached rests go to the decode rank that holds the prefix, within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.router.balancers.base import Rejected
from headrace.router.balancers.conditional import Conditional, ConditionalPolicy, computed_at_decode
from headrace.router.balancers.decode import DecodePolicy, Joint
from headrace.router.cost.decode import DecodeCost
from headrace.router.fleet import Amount, Fleet
from headrace.router.index.base import PrefixMatch
from headrace.router.request import RoutingRequest
from headrace.router.topology import Role
from tests.router.balancers.fleets import BLOCK, decodes, fleet_of, match, request

PROMPT = 8 * BLOCK + 40


def conditional(fleet: Fleet, most: int = 256, budget: int = 400, **policy: float) -> Conditional:
    found = Conditional(fleet, Joint(fleet, DecodeCost(), DecodePolicy(**policy)), ConditionalPolicy(most))
    for rank in fleet.candidates(Role.DECODE):
        found.told(rank.id, budget)
    return found


def asked(prompt: int = PROMPT) -> RoutingRequest:
    return replace(request(prompt), usable_tokens=prompt - 1)


def names(found: Conditional, prefix: PrefixMatch, one: RoutingRequest | None = None) -> list[str]:
    pairs = found.order(asked() if one is None else one, prefix, 0.0)
    assert all(computed_at_decode(pair) for pair in pairs)
    return [pair.decode.id.replica_id for pair in pairs]


def test_the_rank_that_lacks_least_goes_first_and_those_that_lack_much_not_at_all() -> None:
    fleet = fleet_of(*decodes(4))
    assert names(conditional(fleet), match([0, 7, 8, 6])) == ["ddc002", "ddc001"]
    pair = conditional(fleet).order(asked(), match([0, 7, 8, 6]), 0.0)[0]
    assert (pair.prediction.cached_tokens, pair.prediction.new_tokens) == (8 * BLOCK, 40)


def test_off_by_default_and_never_with_images() -> None:
    fleet = fleet_of(*decodes(1))
    assert names(conditional(fleet, most=0), match([8])) == []
    assert names(conditional(fleet), match([8]), replace(asked(), image_tokens=5)) == []


def test_a_step_must_have_room_and_less_of_it_after_each_choice() -> None:
    """L22: what was sent counts until the rank says otherwise; a rank that never said anything has no room."""
    fleet = fleet_of(*decodes(1))
    found = conditional(fleet, budget=100)
    for _ in range(2):
        (pair,) = found.order(asked(), match([8]), 0.0)
        found.chosen(pair)
    assert names(found, match([8])) == []
    found.told(fleet.candidates(Role.DECODE)[0].id, 40)
    assert names(found, match([8])) == ["ddc000"]
    found.clear(0)
    assert names(found, match([8])) == []


def test_a_prefix_draws_nothing_to_a_rank_that_is_behind() -> None:
    """L21: its steps would be much slower than the others'."""
    fleet = fleet_of(*decodes(3))
    held = fleet.candidates(Role.DECODE)[0].id
    assert names(conditional(fleet), match([8, 0, 0])) == ["ddc000"]
    fleet.begin(held, "x", Amount(200_000, requests=100), 0.0)
    assert names(conditional(fleet), match([8, 0, 0])) == []


def test_overload_is_overload_here_too() -> None:
    """L12: who would break the promise of token times is not taken because its prompt is small."""
    fleet = fleet_of(*decodes(1))
    fleet.begin(fleet.candidates(Role.DECODE)[0].id, "x", Amount(900_000, requests=200), 0.0)
    with pytest.raises(Rejected):
        names(conditional(fleet, objective_s=0.001), match([8]))


def test_tiny_prompts_follow_the_decode_balancer() -> None:
    """Nothing is cached anywhere; the emptier rank goes first."""
    fleet = fleet_of(*decodes(2))
    fleet.begin(fleet.candidates(Role.DECODE)[0].id, "x", Amount(100, requests=1), 0.0)
    assert names(conditional(fleet), match([0, 0]), asked(30)) == ["ddc001", "ddc000"]


@pytest.mark.parametrize("wrong", [{"most_tokens": -1}, {"slack": -0.1}])
def test_policies_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="negative"):
        ConditionalPolicy(**wrong)  # type: ignore[arg-type]
