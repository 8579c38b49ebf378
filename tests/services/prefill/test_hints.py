"""What the router says of peers is asked first and believed never (L3)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.kvcache.keys import block_keys, snapshot_key
from headrace.services.prefill.hints import MOST_SOURCES, take_hints
from headrace.v1 import common_pb2, prefill_pb2

KEYS = block_keys(bytes(32), list(range(48)), 8)


class Peers:
    """Records what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[list[bytes], str]] = []

    def hint(self, keys: list[bytes], peer: str) -> None:
        self.told.append((keys, peer))


def request(*sources: tuple[str, int, int]) -> prefill_pb2.RunRequest:
    return prefill_pb2.RunRequest(
        spec=common_pb2.RequestSpec(block_keys=KEYS),
        sources=[
            prefill_pb2.PrefixSource(peer=common_pb2.PeerId(incarnation=name), first_block=first, blocks=blocks)
            for name, first, blocks in sources
        ],
    )


@pytest.mark.parametrize("snapshots", [False, True])
def test_peers_are_asked_for_their_blocks_and_the_snapshots_behind(snapshots: bool) -> None:
    peers: Any = Peers()
    layout: Any = SimpleNamespace(has_snapshots=snapshots, ring_tokens=22)
    take_hints(request(("a", 0, 2), ("b", 2, 4)), layout, peers)
    behind = [[snapshot_key(key, 22) for key in keys] if snapshots else [] for keys in (KEYS[:2], KEYS[2:6])]
    assert peers.told == [([*KEYS[:2], *behind[0]], "a"), ([*KEYS[2:6], *behind[1]], "b")]


def test_nonsense_is_no_error() -> None:
    """L13: ranges beyond the prompt, peers without a name, and too many of them."""
    peers: Any = Peers()
    layout: Any = SimpleNamespace(has_snapshots=False)
    take_hints(request(("a", 5, 4_000_000_000), ("b", 100, 1), ("", 0, 1), ("c", 0, 0)), layout, peers)
    assert peers.told == [(list(KEYS[5:]), "a")]
    peers.told.clear()
    take_hints(request(*[("a", 0, 1)] * 100), layout, peers)
    assert len(peers.told) == MOST_SOURCES
    peers.told.clear()
    odd, with_snapshots = request(("a", 0, 2)), SimpleNamespace(has_snapshots=True, ring_tokens=22)
    odd.spec.block_keys[1] = b"no key"
    take_hints(odd, with_snapshots, peers)  # type: ignore[arg-type]
    assert not peers.told
