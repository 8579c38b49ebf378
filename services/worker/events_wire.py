"""Engine events and values ↔ their wire forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from headrace.engine.messages import Finished, FinishReason, FirstToken, PromptCounts, TokenLogprob, Tokens
from headrace.services.runtime.engine_errors import from_engine
from headrace.services.runtime.errors import InvalidArgument, to_proto
from headrace.v1 import common_pb2, decode_pb2, prefill_pb2

TokenBytes = Callable[[int], bytes]
"""Bytes of one token alone; empty where the model folder has no tokenizer."""

_REASONS: Final = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: common_pb2.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_FROM_OUTSIDE: Final[dict[int, FinishReason]] = {
    common_pb2.FINISH_REASON_UNSPECIFIED: FinishReason.CANCELLED,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    common_pb2.FINISH_REASON_DEADLINE: FinishReason.DEADLINE,
    common_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}


def reason_from_wire(reason: int, field: str) -> FinishReason:
    """The reason with which a caller ends a request; unset is taken as cancelled. Raises InvalidArgument for STOP and
    LENGTH, which only the model's output brings about."""
    if reason not in _FROM_OUTSIDE:
        raise InvalidArgument("must be CANCELLED, DEADLINE or ERROR", field=field)
    return _FROM_OUTSIDE[reason]


def tokens_to_wire(event: Tokens, token_bytes: TokenBytes) -> common_pb2.TokensEvent:
    """New tokens of one choice."""
    return common_pb2.TokensEvent(
        choice=event.choice,
        offset=event.offset,
        token_ids=event.token_ids,
        text=event.text,
        logprobs=[logprob_to_wire(logprob, token_bytes) for logprob in event.logprobs],
    )


def finished_to_wire(event: Finished, replica_id: str) -> common_pb2.FinishedEvent:
    """The end of one choice, for a router. Why a request was cancelled tells it whether to continue it elsewhere."""
    wire = common_pb2.FinishedEvent(
        choice=event.choice, reason=_REASONS[event.reason], completion_tokens=event.completion_tokens
    )
    if event.reason in (FinishReason.ERROR, FinishReason.CANCELLED) and event.error is not None:
        wire.error.CopyFrom(to_proto(from_engine(event.error)))
        wire.error.replica_id = replica_id
    if isinstance(event.stop_match, str):
        wire.stop_string = event.stop_match
    elif event.stop_match is not None:
        wire.stop_token_id = event.stop_match
    return wire


def logprob_to_wire(logprob: TokenLogprob, token_bytes: TokenBytes) -> common_pb2.PositionLogprobs:
    """Log-probabilities at one position."""

    def one(token_id: int, value: float) -> common_pb2.TokenLogprob:
        return common_pb2.TokenLogprob(token_id=token_id, logprob=value, text=token_bytes(token_id))

    return common_pb2.PositionLogprobs(
        chosen=one(logprob.token_id, logprob.logprob), top=[one(token_id, value) for token_id, value in logprob.top]
    )


def logprob_from_wire(wire: common_pb2.PositionLogprobs) -> TokenLogprob:
    """Inverse of `logprob_to_wire`; the bytes are the receiver's to make again."""
    top = tuple((entry.token_id, entry.logprob) for entry in wire.top)
    return TokenLogprob(wire.chosen.token_id, wire.chosen.logprob, top)


def first_tokens_to_wire(first: Sequence[FirstToken], token_bytes: TokenBytes) -> list[decode_pb2.FirstToken]:
    """Tokens that prefill drew."""
    return [
        decode_pb2.FirstToken(
            choice=token.choice,
            token_id=token.token_id,
            logprobs=None if token.logprob is None else logprob_to_wire(token.logprob, token_bytes),
        )
        for token in first
    ]


def first_tokens_from_wire(wire: Sequence[decode_pb2.FirstToken]) -> tuple[FirstToken, ...]:
    """Inverse of `first_tokens_to_wire`."""
    return tuple(
        FirstToken(
            token.choice, token.token_id, logprob_from_wire(token.logprobs) if token.HasField("logprobs") else None
        )
        for token in wire
    )


def counts_from_wire(report: prefill_pb2.PrefillReport) -> PromptCounts:
    """Origins of the prompt's tokens as prefill tells them."""
    return PromptCounts(
        cached=report.cached_tokens,
        loaded=report.loaded_tokens,
        computed=report.computed_tokens,
        recomputed=report.recomputed_tokens,
    )


def microseconds(seconds: float) -> int:
    """Never negative."""
    return max(0, round(seconds * 1e6))
