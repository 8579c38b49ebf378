"""Fleets and requests for the balancers' tests."""

from __future__ import annotations

import hashlib

import numpy as np

from headrace.router.fleet import Fleet
from headrace.router.index.base import PrefixMatch
from headrace.router.ranks import RankNumbers
from headrace.router.request import RoutingRequest
from headrace.router.topology import Candidate, RankId, Role

BLOCK = 128


def candidate(
    name: str,
    role: Role,
    *,
    rank: int = 0,
    data_centre: str = "dc",
    rows: int = 10_000,
    slots: int = 256,
    token_bytes: int = 8_900,
) -> Candidate:
    """Layout: blocks alone, of `token_bytes` a token."""
    return Candidate(
        RankId(name, "1", rank), role, data_centre, "h", rows, slots, BLOCK, 1_000_000, token_bytes * BLOCK
    )


def fleet_of(*ranks: Candidate, half_life_s: float | None = 60.0) -> Fleet:
    """Ranks of one name are one replica."""
    fleet = Fleet(RankNumbers(), half_life_s=half_life_s)
    names = dict.fromkeys(rank.id.replica_id for rank in ranks)
    for name in names:
        fleet.put(name, "1", [rank for rank in ranks if rank.id.replica_id == name])
    return fleet


def prefills(count: int, data_centre: str = "dc", **changes: int) -> list[Candidate]:
    return [candidate(f"p{index:03}", Role.PREFILL, data_centre=data_centre, **changes) for index in range(count)]


def decodes(count: int, data_centre: str = "dc", **capacity: int) -> list[Candidate]:
    return [
        candidate(f"d{data_centre}{index:03}", Role.DECODE, data_centre=data_centre, **capacity)
        for index in range(count)
    ]


def keys(text: str) -> tuple[bytes, ...]:
    """A chain: one block a letter."""
    return tuple(hashlib.sha256(text[: end + 1].encode()).digest() for end in range(len(text)))


def request(
    prompt: int = 8 * BLOCK, *, text: str = "", deadline: float = 1e9, choices: int = 1, affinity: bytes = b"k"
) -> RoutingRequest:
    blocks = keys(text)
    return RoutingRequest(
        request_id="r",
        prompt_tokens=max(prompt, len(text) * BLOCK),
        max_tokens=64,
        choices=choices,
        image_tokens=0,
        affinity_key=blocks[0] if blocks else affinity,
        deadline=deadline,
        blocks=blocks,
    )


def match(device: list[int], local: list[int] | None = None, shared: int = 0) -> PrefixMatch:
    """By rank number."""
    own = np.array(device, np.int32)
    return PrefixMatch(own, own if local is None else np.array(local, np.int32), shared)
