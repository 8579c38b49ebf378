"""How long a prefix takes to load, by where it lies."""

from __future__ import annotations

import enum
import math

import numpy as np

from headrace.router.cost.curves import Floats, Numbers


class Source(enum.Enum):
    """Where a prefix is loaded from."""

    HOST = "host"
    """The rank's own host tier."""
    SHARED = "shared"
    """The store or a peer's host tier."""


class LoadingRates:
    """Tokens per second and a fixed delay, by source; rates follow what is observed, within bounds."""

    FOLLOW = 0.1
    BOUND = 100.0
    """A rate stays within this factor of its prior."""

    def __init__(
        self,
        host_tokens_per_s: float = 2e6,
        shared_tokens_per_s: float = 4e5,
        host_delay_s: float = 0.001,
        shared_delay_s: float = 0.005,
    ) -> None:
        """Priors: 8.8 kB of KV a token over PCIe at 20 GB/s, and from the store or a peer at 4 GB/s."""
        if min(host_tokens_per_s, shared_tokens_per_s) <= 0 or min(host_delay_s, shared_delay_s) < 0:
            raise ValueError("loading rates must be positive and delays not negative")
        self._prior = {Source.HOST: math.log(host_tokens_per_s), Source.SHARED: math.log(shared_tokens_per_s)}
        self._rates = dict(self._prior)
        self._delays = {Source.HOST: host_delay_s, Source.SHARED: shared_delay_s}
        self.observations = 0

    def rate(self, source: Source) -> float:
        """Tokens per second."""
        return math.exp(self._rates[source])

    def delay(self, source: Source) -> float:
        """Seconds before the first token."""
        return self._delays[source]

    def seconds(self, source: Source, tokens: Numbers) -> Floats:
        """Time to load so many tokens; nothing for none."""
        wanted = np.asarray(tokens, np.float64)
        result: Floats = np.where(wanted > 0, self._delays[source] + wanted / self.rate(source), 0.0)
        return result

    def observe(self, source: Source, tokens: int, seconds: float) -> None:
        """So many tokens took so long, the delay included."""
        if tokens <= 0 or not math.isfinite(seconds) or seconds <= 0:
            return
        moving = max(seconds - self._delays[source], seconds / 10)
        step = math.log(tokens / moving) - self._rates[source]
        prior = self._prior[source]
        bound = math.log(self.BOUND)
        self.observations += 1
        # One wild observation moves a rate by a tenth of a factor e at most.
        self._rates[source] += self.FOLLOW * min(max(step, -1.0), 1.0)
        self._rates[source] = min(max(self._rates[source], prior - bound), prior + bound)
