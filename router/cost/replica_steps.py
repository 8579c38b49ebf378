"""What a step of a decode replica says about the cost of decoding."""

from __future__ import annotations

import numpy as np

from headrace.router.cost.curves import Floats
from headrace.router.cost.decode import DecodeCost
from headrace.router.topology import RankId


class ReplicaSteps:
    """Feeds a decode cost model from what ranks report.

    The ranks of a replica step together, so a step lasts as long as its fullest rank needs: only that rank's numbers
    explain it. Learnt for every rank, the near empty ones would teach that requests and KV cost nothing.
    """

    def __init__(self, cost: DecodeCost) -> None:
        self._cost = cost
        self._told: dict[tuple[str, str], Floats] = {}
        """By life of a replica: requests and KV tokens of its ranks' last steps, [2, ranks]."""

    def told(self, rank: RankId, number: int, requests: int, kv_tokens: int, seconds: float, now: float) -> None:
        """The last step of the rank, whose number in all tables is `number`, had so many requests and KV tokens and
        took `seconds`."""
        life = rank.replica_id, rank.incarnation
        told = self._told.get(life)
        if told is None or told.shape[1] <= rank.rank:
            more: Floats = np.zeros((2, rank.rank + 1))
            if told is not None:
                more[:, : told.shape[1]] = told
            told = self._told[life] = more
        told[:, rank.rank] = requests, kv_tokens
        if requests and int(self._cost.step(told[0], told[1]).argmax()) == rank.rank:
            self._cost.observe(number, requests, kv_tokens, seconds, now)

    def idle(self, rank: RankId) -> None:
        """Nothing runs on the rank any more: it sets no replica's pace."""
        told = self._told.get((rank.replica_id, rank.incarnation))
        if told is not None and rank.rank < told.shape[1]:
            told[:, rank.rank] = 0.0

    def forget(self, rank: RankId, number: int) -> None:
        """The rank is gone; its number is the next newcomer's."""
        life = rank.replica_id, rank.incarnation
        self.idle(rank)
        if life in self._told and not self._told[life].any():
            del self._told[life]
        self._cost.clear(number)
