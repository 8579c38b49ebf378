"""Who the peers are: connected agents by incarnation (L14), and whether a peer's process is known to be dead.

Death frees quarantined rows (L6), so it needs evidence: a lease that ran out is none, a stopped process is alive and
its write lands when it continues (spec/protocol.md). On one host the kernel knows; of another host's process nothing
is known here, and its rows wait for the notice or for the landing region to be rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from headrace.kvcache.process import Liveness, ProcessIdentity
from headrace.kvcache.transfer.base import PeerDescription
from headrace.kvcache.transfer.errors import PeerRefused, Refusal

__all__ = ["Liveness", "Peer", "PeerTable", "ProcessIdentity", "check_fingerprints"]


@dataclass(frozen=True)
class Peer:
    """A connected agent."""

    description: PeerDescription
    process: ProcessIdentity
    versions: tuple[int, ...]
    """Of the description's landing regions, in their order."""
    wires: Mapping[tuple[str, str], str]
    """(memory here, memory there) → transport, as found at the handshake."""
    lost: bool = False
    """The connection broke; a new handshake may bring it back (L14: not blacklisted for ever)."""

    @property
    def transport(self) -> str:
        """All wires in use, for metrics and reports."""
        return "+".join(sorted(set(self.wires.values())))

    def wire(self, source: str, target: str) -> str:
        return self.wires.get((source, target), "unknown")


class PeerTable:
    """Connected agents by (incarnation, rank). Changed by the transfer thread only; readers see whole snapshots."""

    def __init__(self) -> None:
        self._peers: Mapping[tuple[str, int], Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._peers.values()))

    def find(self, incarnation: str, rank: int) -> Peer | None:
        return self._peers.get((incarnation, rank))

    def put(self, peer: Peer) -> None:
        key = (peer.description.incarnation, peer.description.rank)
        self._peers = {**self._peers, key: peer}

    def mark_lost(self, incarnation: str, rank: int) -> None:
        peer = self.find(incarnation, rank)
        if peer is not None:
            self.put(replace(peer, lost=True))

    def remove(self, incarnation: str) -> tuple[Peer, ...]:
        """Every agent of the incarnation, now forgotten."""
        removed = tuple(peer for peer in self if peer.description.incarnation == incarnation)
        self._peers = {key: peer for key, peer in self._peers.items() if key[0] != incarnation}
        return removed


def check_fingerprints(peer: PeerDescription, *, layout_fingerprint: bytes | None, model_fingerprint: bytes) -> None:
    """L14: refuse at registration what could never be exchanged. A side without KV (None) has no layout to differ.

    Raises:
        PeerRefused: LAYOUT or MODEL.
    """
    if peer.model_fingerprint != model_fingerprint:
        raise PeerRefused(
            Refusal.MODEL,
            f"it serves model {peer.model_fingerprint.hex()[:16]}, this process {model_fingerprint.hex()[:16]}; "
            f"start both on the same weights, config and numeric mode",
        )
    both = peer.layout_fingerprint, layout_fingerprint
    if None not in both and both[0] != both[1]:
        theirs, ours = (fingerprint.hex()[:16] for fingerprint in both if fingerprint is not None)
        raise PeerRefused(
            Refusal.LAYOUT,
            f"its KV layout is {theirs}, this process has {ours}; start both with the same cache settings",
        )
