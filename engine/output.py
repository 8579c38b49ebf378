"""From sampled tokens to what the client sees: stop conditions, text with hold-back, logprobs at the right token.

Source: spec/protocol.md, "Events to the client".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headrace.engine.messages import FinishReason, TokenLogprob, Tokens
from headrace.engine.request import EngineRequest
from headrace.engine.sequence import SampledToken
from headrace.engine.text.detokenizer import TextPiece, TextStream
from headrace.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Ending:
    """Why a choice ends with the token just accepted."""

    reason: FinishReason
    stop_match: str | int | None = None


class ChoiceOutput:
    """The output side of one choice."""

    def __init__(
        self,
        request: EngineRequest,
        choice: int,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        context_tokens: int,
    ) -> None:
        self._request = request
        self._choice = choice
        self._stream = None if tokenizer is None else TextStream(tokenizer, request.stop)
        self._eos = frozenset(() if request.ignore_eos else eos_token_ids)
        self._stop_ids = frozenset(request.stop_token_ids)
        self._length_limit = min(request.max_tokens, context_tokens - request.prompt_length)
        self._logprobs: list[TokenLogprob] = []
        delivered = request.delivered_to(choice)
        self._length = len(delivered)
        self._released = 0
        self._resumed = len(delivered)
        for token in delivered:
            self._take(self._push(token, silent=False))

    @property
    def length(self) -> int:
        """Tokens of the choice so far, delivered by an earlier attempt included."""
        return self._length

    def accept(self, token: SampledToken) -> tuple[Tokens | None, Ending | None]:
        """Take one sampled token; what may be shown now, and the ending if this was the last token."""
        self._length += 1
        if token.logprob is not None:
            self._logprobs.append(token.logprob)
        ending = self._ending_of_id(token.token_id)
        piece = self._push(token.token_id, silent=ending is not None)
        if piece.stopped is not None:
            return self._take(piece), Ending(FinishReason.STOP, piece.stopped)
        if ending is None and self._length >= self._length_limit:
            ending = Ending(FinishReason.LENGTH)
        if ending is None:
            return self._take(piece), None
        return self._take(self._finish(piece)), ending

    def flush(self) -> Tokens | None:
        """Everything held back, for an ending that no token caused (cancel, deadline, error)."""
        return self._take(self._finish(TextPiece()))

    def _ending_of_id(self, token_id: int) -> Ending | None:
        """EOS and stop ids end a choice; the sampler masks both until min_tokens are there, or until a constraint
        allows nothing else."""
        if self._length <= self._request.min_tokens and self._request.constraint is None:
            return None
        if token_id in self._stop_ids:
            return Ending(FinishReason.STOP, token_id)
        return Ending(FinishReason.STOP) if token_id in self._eos else None

    def _push(self, token_id: int, *, silent: bool) -> TextPiece:
        if self._stream is None:
            return TextPiece((token_id,))
        return self._stream.push(token_id, silent=silent)

    def _finish(self, piece: TextPiece) -> TextPiece:
        if self._stream is None:
            return piece
        rest = self._stream.finish()
        return TextPiece(piece.token_ids + rest.token_ids, piece.text + rest.text, rest.stopped)

    def _take(self, piece: TextPiece) -> Tokens | None:
        """The event of released tokens; None for nothing, or for what an earlier attempt delivered.

        Releases depend on the tokens alone, so pieces of a continuation are cut where the earlier attempt cut them.
        """
        if not piece.token_ids:
            return None
        offset = self._released
        self._released += len(piece.token_ids)
        if offset < self._resumed:
            return None
        count = min(len(piece.token_ids), len(self._logprobs))
        logprobs, self._logprobs = tuple(self._logprobs[:count]), self._logprobs[count:]
        return Tokens(self._request.key, self._choice, offset, piece.token_ids, piece.text, logprobs)
