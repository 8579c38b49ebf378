"""Rendezvous (highest random weight) hashing: equal keys agree on an order of ranks without talking to each other.

A rank's coming or going moves only the keys that it wins or had won (Thaler and Ravishankar, 1998).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from headrace.router.topology import RankId

Weights = npt.NDArray[np.uint64]


def seed(rank: RankId) -> int:
    """64 bits of a rank. The incarnation is not in them: a restarted replica keeps its keys, and finds its
    store-backed prefixes asked for again."""
    name = f"{rank.replica_id}\0{rank.rank}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def weights(key: bytes, seeds: Weights) -> Weights:
    """64-bit weights of ranks, by their seeds, for a key; the highest wins. The finaliser of splitmix64 over key and
    seed: a microsecond for hundreds of ranks."""
    x = seeds ^ np.uint64(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little"))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Weights = x ^ (x >> np.uint64(31))
    return mixed
