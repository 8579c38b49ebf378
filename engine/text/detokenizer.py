"""Tokens to text as they come: incremental UTF-8, stop strings, and what may be shown already.

Text that may begin a stop string is held back with its tokens; the token that completes a match is delivered and
counted, and the text ends before the match (spec/protocol.md, "Events to the client"). Releases happen at token
borders, so every released text belongs to exactly the released tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.text.errors import TextError
from headrace.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextPiece:
    """What a push or a flush releases: whole tokens and their text, both possibly empty."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    stopped: str | None = None
    """The stop string that these tokens complete; the text ends before it and nothing may follow."""


def held_suffix(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of any stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


class TextStream:
    """Incremental detokenizer of one choice.

    A stream is a function of the tokens pushed: pushing the tokens already delivered to a client into a fresh stream
    puts it into the state of the one that delivered them, which is how a continuation elsewhere resumes (L15).
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, skip_special: bool = True) -> None:
        """Raises TextError for an empty stop string, which would match everywhere."""
        if any(not stop for stop in stops):
            raise TextError("a stop string may not be empty")
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._tokens: list[int] = []
        self._ends: list[int] = []
        """For every held token the end of its text in `_text`."""
        self._text = ""
        self._stopped = False

    @property
    def held_tokens(self) -> int:
        """Tokens pushed and not yet released."""
        return len(self._tokens)

    def push(self, token: int, *, silent: bool = False) -> TextPiece:
        """Add one token. `silent`: it counts and is delivered but is never text (EOS, a stop token id)."""
        if self._stopped:
            raise RuntimeError("the stream ended with a stop string; nothing may be pushed after it")
        hidden = silent or (self._skip_special and self._tokenizer.is_special(token))
        self._text += "" if hidden else self._utf8.decode(self._tokenizer.token_bytes(token))
        self._tokens.append(token)
        self._ends.append(len(self._text))
        return self._release(self._match())

    def finish(self) -> TextPiece:
        """Release everything held; bytes of an unfinished character become U+FFFD."""
        if self._stopped:
            return TextPiece()
        self._text += self._utf8.decode(b"", final=True)
        if self._ends:
            self._ends[-1] = len(self._text)
        match = self._match()
        if match is not None:
            return self._release(match)
        piece = TextPiece(tuple(self._tokens), self._text)
        self._tokens, self._ends, self._text = [], [], ""
        return piece

    def _match(self) -> tuple[int, str] | None:
        """The stop string that begins earliest in the held text (the longest of those), as (start, stop)."""
        found = [(start, -len(stop), stop) for stop in self._stops if (start := self._text.find(stop)) >= 0]
        if not found:
            return None
        start, _, stop = min(found)
        return start, stop

    def _release(self, match: tuple[int, str] | None) -> TextPiece:
        if match is not None:
            start, stop = match
            piece = TextPiece(tuple(self._tokens), self._text[:start], stop)
            self._tokens, self._ends, self._text, self._stopped = [], [], "", True
            return piece
        free = len(self._text) - held_suffix(self._text, self._stops)
        count = sum(1 for end in self._ends if end <= free)
        if not count:
            return TextPiece()
        cut = self._ends[count - 1]
        piece = TextPiece(tuple(self._tokens[:count]), self._text[:cut])
        self._tokens, self._text = self._tokens[count:], self._text[cut:]
        self._ends = [end - cut for end in self._ends[count:]]
        return piece
