"""What one attempt generates: all choices of a request, or after a failure a single one, from its delivered tokens on.

A single choice is a request of its own for the workers (services/runtime/single_choice.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.services.router.place import Placed
from headrace.services.runtime.single_choice import single_choice
from headrace.v1 import common_pb2


@dataclass(eq=False)
class Part:
    """Choices that are generated together."""

    placed: Placed
    choices: tuple[int, ...]
    """The client's number of each."""
    attempt: int
    """Number of the last attempt."""
    tries: int = 0
    """Attempts so far, those at the whole request included."""

    def single(self, choice: int) -> Part:
        """One of its choices by itself."""
        if len(self.choices) == 1:
            return self
        spec = single_choice(self.placed.spec, choice)
        routing = replace(self.placed.routing, choices=1)
        return Part(replace(self.placed, spec=spec, routing=routing), (choice,), self.attempt, self.tries)

    def after(self, delivered: Mapping[int, Sequence[int]]) -> Placed:
        """The part as its next attempt gets it. `delivered`: tokens by the client's choice."""
        tokens = [delivered[choice] for choice in self.choices]
        if not any(tokens):
            return self.placed
        assert len(tokens) == 1, "several choices are continued one by one"
        spec = common_pb2.RequestSpec()
        spec.CopyFrom(self.placed.spec)
        spec.choices[0].delivered_token_ids[:] = tokens[0]
        routing = self.placed.routing
        # What has to be computed is longer; what may come from a cache is not.
        known = routing.prompt_tokens + len(tokens[0])
        left = max(1, routing.max_tokens - len(tokens[0]))
        return replace(self.placed, spec=spec, routing=replace(routing, prompt_tokens=known, max_tokens=left))
