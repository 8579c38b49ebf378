"""How tokens are drawn: the sampling fields of a request, checked once at the border. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from headrace.engine.errors import invalid

MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy (spec §16)."""


@dataclass(frozen=True)
class SamplingParams:
    """What shapes a choice's distribution. The number of choices and the seed belong to the request.

    They act in this order: repetition penalty, presence and frequency penalties, logit bias, suppression of ending
    tokens before min_tokens; then temperature, and on the probabilities it gives top_p, top_k and min_p, each judged on
    the whole distribution: a token stays if all three keep it. The mask of a constraint comes behind suppression: what
    it forbids has no probability, and the others share what is left. Log-probabilities are those of the raw logits,
    before all of this: under a mask they say how likely the model itself holds a token, and the likeliest tokens may
    be ones that the mask forbids.
    """

    temperature: float = 1.0
    """Divides the logits. Under 1e-5 the choice is greedy: the largest logit, lowest id among equals."""
    top_p: float = 1.0
    """A token is dropped if the mass strictly before it, likeliest first, exceeds this; 1 is off. In (0, 1]."""
    top_k: int = 0
    """Only the k likeliest stay; 0 is off."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are dropped. In [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token generated so far. In [−2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence among the tokens generated so far. In [−2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens of the prompt or the output. Above 0; 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias in [−100, 100]); an id at most once."""
    logprobs: int | None = None
    """None: no log-probabilities; k ≥ 0: of the drawn token and of the k likeliest."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise invalid(f"sampling.{field.name} is {value}; it must be a finite number")
        _within("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if not 0.0 < self.top_p <= 1.0:
            raise invalid(f"sampling.top_p is {self.top_p}; it must lie in (0, 1]")
        if self.top_k < 0:
            raise invalid(f"sampling.top_k is {self.top_k}; it must be 0 (off) or more")
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _within("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        if self.repetition_penalty <= 0.0:
            raise invalid(f"sampling.repetition_penalty is {self.repetition_penalty}; it must be above 0")
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_biases()

    def _check_biases(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise invalid(f"sampling.logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIASES}")
        if len({token for token, _ in self.logit_bias}) != len(self.logit_bias):
            raise invalid("sampling.logit_bias names a token twice; name each once")
        for token, bias in self.logit_bias:
            if token < 0:
                raise invalid(f"sampling.logit_bias names token {token}; ids start at 0")
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise invalid(f"sampling.logit_bias of token {token} is {bias}; it must lie in [-100, 100]")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse biases on tokens that the model does not have (L13)."""
        for token, _ in self.logit_bias:
            if token >= vocab_size:
                raise invalid(f"sampling.logit_bias names token {token}, outside the vocabulary of {vocab_size}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def truncates(self) -> bool:
        """Whether top_p, top_k or min_p may drop a token."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise invalid(f"sampling.{name} is {value}; it must lie in [{low:g}, {high:g}]")
