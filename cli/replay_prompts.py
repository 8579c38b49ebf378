"""A trace's prompts as token ids: the same block is always the same tokens, so that sharing is real."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from headrace.router.simulate.traces import TraceRow


@dataclass(frozen=True, slots=True)
class Scale:
    """How a trace is shrunk to a model. Lengths are multiplied, then cut to what the model takes."""

    tokens: float
    """Factor of prompt lengths."""
    output: float
    """Factor of output lengths."""
    context_tokens: int
    """Of the model: prompt and output together."""
    most_output: int


class Prompts:
    """Makes them for one vocabulary."""

    def __init__(self, vocab_size: int, avoided: Collection[int], block_tokens: int, scale: Scale, seed: int) -> None:
        """`avoided`: tokens that mean something (end of sequence, images). `block_tokens`: of the trace; 0: it names no
        blocks, and nothing is shared. Raises ValueError for a scale at which a block has no token."""
        self._tokens = [token for token in range(vocab_size) if token not in set(avoided)]
        # No more than a prompt may have: a block is drawn as a whole.
        self._block = min(scale.context_tokens, max(1, round((block_tokens or 512) * scale.tokens)))
        if scale.tokens <= 0 or scale.output <= 0:
            raise ValueError(f"scales {scale.tokens:g} and {scale.output:g} must be positive")
        self._scale = scale
        self._seed = seed

    def lengths(self, row: TraceRow) -> tuple[int, int]:
        """(prompt, output) tokens of a row."""
        scale = self._scale
        output = max(1, min(round(row.output_tokens * scale.output), scale.most_output, scale.context_tokens // 2))
        room = scale.context_tokens - output - 1
        return max(1, min(round(row.prompt_tokens * scale.tokens), room)), output

    def prompt(self, number: int, row: TraceRow) -> list[int]:
        """Token ids of row `number`: its blocks' tokens, then tokens of its own."""
        length, _ = self.lengths(row)
        ids: list[int] = []
        for block in row.blocks:
            if len(ids) >= length:
                break
            ids += self._drawn(f"block {block}", self._block)
        if len(ids) < length:
            ids += self._drawn(f"row {number}", length - len(ids))
        return ids[:length]

    def _drawn(self, name: str, count: int) -> list[int]:
        return random.Random(f"{self._seed} {name}").choices(self._tokens, k=count)
