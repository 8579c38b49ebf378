"""What the router thinks of a prompt's prefix, handed to the source that asks peers. Whatever it says is no error."""

from __future__ import annotations

from typing import Final

from headrace.kvcache.host.peers import PeerHostSource
from headrace.kvcache.keys import KEY_BYTES, snapshot_key
from headrace.kvcache.layout import KVLayout
from headrace.v1 import prefill_pb2

MOST_SOURCES: Final = 16


def take_hints(request: prefill_pb2.RunRequest, layout: KVLayout, peers: PeerHostSource) -> None:
    """These peers are asked first for these blocks, and for the snapshots behind them."""
    for source in request.sources[:MOST_SOURCES]:
        first, count = source.first_block, source.blocks
        keys = list(request.spec.block_keys[first : first + count])
        if not keys or not source.peer.incarnation or any(len(key) != KEY_BYTES for key in keys):
            continue
        if layout.has_snapshots:
            # The snapshot that makes a prefix usable may lie at any of its last boundaries; asking is free.
            keys += [snapshot_key(key, layout.ring_tokens) for key in keys[-4:]]
        peers.hint(keys, source.peer.incarnation)
