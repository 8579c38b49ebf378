"""Where one choice stands in its language, and which tokens may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.engine.errors import EngineError, ErrorCode, invalid

if TYPE_CHECKING:
    from headrace.engine.masks.grammars import Grammar

Bits = NDArray[np.int32]
"""[rows, ⌈vocabulary ÷ 32⌉]: bit i of word w of a row is token 32·w + i; 1 is allowed."""


class ChoiceMask:
    """Follows the tokens of a choice. What it knows is a function of them alone, so that a continuation elsewhere, or
    one after a preemption, only has to be told them (L15)."""

    def __init__(self, grammar: Grammar) -> None:
        from headrace.engine.masks.library import xgrammar  # imported already by whoever has compiled the grammar

        self._grammar = grammar
        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self._taken = 0
        self._free = bool(grammar.after)
        """The mark behind which the language begins has not come."""

    def follow(self, output: Sequence[int], delivered: int = 0) -> int:
        """Take the tokens of the choice that are new since the last call; how many.

        Raises EngineError for a token that the language does not allow: INVALID_ARGUMENT if it is one of the first
        `delivered`, which came with the request; INTERNAL if it was drawn here.
        """
        for place in range(self._taken, len(output)):
            if self._free:
                self._free = not self._ends_mark(output, place)
            elif not self._matcher.accept_token(output[place]):
                told = f"token {output[place]} at offset {place} of the output is not in the constraint's language"
                raise invalid(told) if place < delivered else EngineError(ErrorCode.INTERNAL, told)
        new, self._taken = len(output) - self._taken, len(output)
        return new

    def fill(self, bits: Bits, row: int) -> None:
        """Write the mask of the next token. Raises EngineError INVALID_ARGUMENT when no token may follow."""
        if self._free:
            bits[row] = -1
            forbid(bits[row], self._grammar.stop)
            return
        self._matcher.fill_next_token_bitmask(bits, row)
        if not bits[row].any():
            raise invalid("constraint: the output has come to where no token of this model goes on")

    def _ends_mark(self, output: Sequence[int], place: int) -> bool:
        mark = self._grammar.after
        return place + 1 >= len(mark) and tuple(output[place + 1 - len(mark) : place + 1]) == mark


def forbid(row: Bits, tokens: Sequence[int]) -> None:
    """Clear the bits of these tokens."""
    words = row.view(np.uint32)
    for token in tokens:
        words[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))


def any_but(row: Bits, tokens: Sequence[int]) -> bool:
    """Whether a token other than these is allowed."""
    rest = row.copy()
    forbid(rest, tokens)
    return bool(rest.any())
