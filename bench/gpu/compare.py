"""Are these the same answers? Tokens of one engine beside another's, and logits beside logits.

Two devices round differently, so a greedy token may differ where two candidates lie closer together than rounding; a
difference anywhere else is a fault. Tokens behind a difference are another text and are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from headrace.engine.offline import Completion

NARROW = 1e-3
"""Natural logarithm between the two likeliest tokens under which rounding may choose either (float32)."""


@dataclass
class TokenCheck:
    """What comparing two sets of completions found."""

    choices: int = 0
    tokens: int = 0
    """Compared, up to each first difference."""
    equal_choices: int = 0
    narrow: list[str] = field(default_factory=list)
    """Differences within rounding."""
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.choices > 0 and not self.wrong


def compare_tokens(expected: Sequence[Completion], got: Sequence[Completion], *, narrow: float = NARROW) -> TokenCheck:
    """Choice by choice. A difference is excused where the expected choice reports how narrowly its token won."""
    check = TokenCheck()
    for mine, other in zip(expected, got, strict=True):
        for index, (left, right) in enumerate(zip(mine.choices, other.choices, strict=True)):
            check.choices += 1
            name = f"{mine.request.key.request_id}/{index}"
            if left.error is not None or right.error is not None or not left.token_ids:
                check.wrong.append(f"{name}: {left.error or right.error or 'no tokens'}")
                continue
            place = first_difference(left.token_ids, right.token_ids)
            if place is None:
                check.equal_choices += 1
                check.tokens += len(left.token_ids)
                continue
            check.tokens += place
            cut_short = place >= min(len(left.token_ids), len(right.token_ids))
            margin = None if cut_short or place >= len(left.logprobs) else _margin(left.logprobs[place].top)
            where = f"{name}: token {place}, margin {margin if margin is None else round(margin, 6)}"
            (check.narrow if margin is not None and margin < narrow else check.wrong).append(where)
    return check


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first difference of two lists of tokens; a missing tail is one."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _margin(top: Sequence[tuple[int, float]]) -> float | None:
    return top[0][1] - top[1][1] if len(top) > 1 else None


@dataclass(frozen=True)
class LogitCheck:
    """Logits [rows, vocab] beside a reference."""

    rows: int
    max_error: float
    """Largest |difference| of a row ÷ its largest |logit|, over all rows."""
    median_error: float
    """Of the rows' errors: what rounding alone does."""
    same_best: int
    """Rows with the same likeliest token."""


def compare_logits(reference: torch.Tensor, got: torch.Tensor) -> LogitCheck:
    """NaN counts as infinitely wrong."""
    left, right = reference.double().cpu(), got.double().cpu()
    errors = (left - right).abs().amax(-1) / left.abs().amax(-1)
    errors = torch.where(errors.isnan(), float("inf"), errors)
    return LogitCheck(
        rows=left.shape[0],
        max_error=float(errors.max()),
        median_error=float(errors.median()),
        same_best=int((left.argmax(-1) == right.argmax(-1)).sum()),
    )
