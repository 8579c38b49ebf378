"""Of an answer that is read as text, which tokens it was made of: content has their logprobs, calls have none."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import deepseek_recipe as recipe

from headrace.engine.text.tokenizer import Tokenizer
from headrace.services.gateway import hermes
from headrace.services.runtime.errors import Internal
from headrace.v1 import common_pb2

Logprob = tuple[float, list[tuple[int, float]]]
"""Of the chosen token, and of the top ones by their ids."""


def logprob_of(position: common_pb2.PositionLogprobs) -> Logprob:
    """As deepseek-recipe takes it."""
    return position.chosen.logprob, [(one.token_id, one.logprob) for one in position.top]


@dataclass
class _Unit:
    """Tokens that end a character together; mostly one."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    text: str = ""


class TextTokens:
    """One choice's. Tokens go in with their events, and come out as the reader of calls tells their text.

    A token that ends the text and begins a call, or that a stop string cuts, goes out as the text that it has of the
    answer, without a logprob: that of the token says nothing of it.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Collection[int]) -> None:
        """Those of `eos`, and special ones, are no text."""
        self._tokenizer = tokenizer
        self._eos = eos
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._open = _Unit()
        """Whose last character is not there yet."""
        self._units: deque[_Unit] = deque()
        self._used = 0
        """Characters of the first unit that are out."""

    def add(self, event: common_pb2.TokensEvent) -> None:
        """Raises Internal for an event without logprobs."""
        if len(event.token_ids) != len(event.logprobs):
            raise Internal("the router sent tokens without their logprobs; repeat the request")
        for token, position in zip(event.token_ids, event.logprobs, strict=True):
            if token in self._eos or self._tokenizer.is_special(token):
                continue
            self._open.ids.append(token)
            self._open.logprobs.append(logprob_of(position))
            self._open.text += self._utf8.decode(self._tokenizer.token_bytes(token))
            if self._utf8.getstate()[0]:
                continue
            text = hermes.clean(self._open.text)
            if text:
                whole = text == self._open.text
                self._units.append(self._open if whole else _Unit(text=text))
            self._open = _Unit()

    def chunks(self, piece: hermes.Piece) -> Iterator[recipe.InferenceChunk]:
        """What deepseek-recipe is to hear of a piece of the reader's."""
        if not piece.plain:
            self._skip(piece.read)
            if piece.text:
                yield recipe.InferenceChunk.text(piece.text)
            return
        ids: list[int] = []
        logprobs: list[Logprob] = []
        left = piece.text
        while left:
            unit = self._units[0] if self._units else _Unit(text=left)  # an end of bytes that are no character
            if unit.ids and not self._used and len(unit.text) <= len(left):
                ids += unit.ids
                logprobs += unit.logprobs
                left = left[self._skip(len(unit.text)) :]
                continue
            if ids:
                yield recipe.InferenceChunk.tokens(ids, logprobs)
                ids, logprobs = [], []
            size = min(len(unit.text) - self._used, len(left))
            yield recipe.InferenceChunk.text(left[:size])
            left = left[self._skip(size) :]
        if ids:
            yield recipe.InferenceChunk.tokens(ids, logprobs)

    def _skip(self, size: int) -> int:
        """So many characters are out."""
        self._used += size
        while self._units and self._used >= len(self._units[0].text):
            self._used -= len(self._units.popleft().text)
        if not self._units:
            self._used = 0
        return size
