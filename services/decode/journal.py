"""What one request has brought, for the router that has yet to take it and for one that takes the request over. No RPC,
no clock of its own.

Tokens are kept from the attempt's start, so that a new stream can go on where the old one broke, and a new router where
the client's stream did. The credit bounds how many wait to be sent; what was sent is forgotten beyond `most_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.engine.messages import Finished, FinishReason, Tokens, Usage
from headrace.engine.request import RequestKey
from headrace.services.worker.events_wire import TokenBytes, finished_to_wire, microseconds, tokens_to_wire
from headrace.services.worker.spec_wire import attempt_id
from headrace.v1 import common_pb2, decode_pb2, prefill_pb2

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
"""Ends that the model's output brought about."""


@dataclass
class Start:
    """A choice when the attempt began."""

    delivered: tuple[int, ...] = ()
    """Tokens that earlier attempts delivered."""
    cut: int = 0
    """Offset that no event reaches across (ChoiceState.received_tokens)."""


@dataclass
class _Choice:
    """Events of one choice, in order; `sent` of those kept went out."""

    start: Start
    kept: list[common_pb2.TokensEvent] = field(default_factory=list)
    sent: int = 0
    tokens: int = 0
    """In the events that are kept."""
    base: int = -1
    """Offset of the first event that is kept, or would be."""

    def __post_init__(self) -> None:
        self.base = len(self.start.delivered)

    def add(self, event: common_pb2.TokensEvent) -> None:
        self.kept.append(event)
        self.tokens += len(event.token_ids)

    def unsent(self) -> list[common_pb2.TokensEvent]:
        """All that waits: one event, or two around the cut."""
        waiting = self.kept[self.sent :]
        self.sent = len(self.kept)
        before = [event for event in waiting if event.offset < self.start.cut]
        return [merged for part in (before, waiting[len(before) :]) if (merged := _merged(part)) is not None]

    def forget(self, tokens: int) -> None:
        """Of what was sent, forget the oldest events of so many tokens at least, where there are."""
        count = 0
        while tokens > 0 and count < self.sent:
            size = len(self.kept[count].token_ids)
            tokens, self.tokens, self.base, count = tokens - size, self.tokens - size, self.base + size, count + 1
        del self.kept[:count]
        self.sent -= count

    def go_back(self, offset: int) -> bool:
        """Send again from `offset` on; False when that is forgotten, or lies inside an event."""
        places = [self.base, *(event.offset + len(event.token_ids) for event in self.kept)]
        if offset not in places:
            return False
        self.sent = places.index(offset)
        return True

    def ids_before(self, offset: int) -> list[int] | None:
        """Tokens before `offset`; None when some are forgotten."""
        if self.base != len(self.start.delivered):
            return None
        known = [*self.start.delivered, *(token for event in self.kept for token in event.token_ids)]
        return known[:offset]


class RequestJournal:
    """Events of one attempt, in order, towards one router."""

    def __init__(
        self,
        key: RequestKey,
        router: str,
        starts: Sequence[Start],
        image_tokens: int,
        *,
        content: bytes = b"",
        most_tokens: int = 1 << 62,
        now: float = 0.0,
    ) -> None:
        """`content`: digest of what was asked for, tenant included; `most_tokens`: kept of what was sent, over all
        choices; `now`: the moment, on the clock of `add`."""
        self.key = key
        self.router = router
        """Incarnation of the router that owns the request."""
        self.content = content
        self.prefill = prefill_pb2.PrefillReport()
        """As the commit brought it; of a prompt that was computed here, as the engine counted it."""
        self.credit = 0
        self.renewed_at = now
        """When its router last named it."""
        self.begun = False
        """Tokens have come."""
        self.adopted = False
        """A new router has it and has not yet named it on its stream: nothing is sent."""
        self.cancelled = False
        """Its router has given it up: it is about to end, and worth nothing to another one."""
        self.ended_at: float | None = None
        """When the request ended here."""
        self._most_tokens = most_tokens
        self._image_tokens = image_tokens
        self._choices = [_Choice(start) for start in starts]
        self._finished: list[common_pb2.FinishedEvent] = []
        self._broken = False
        """A choice ended otherwise than by the model's output."""
        self._report: decode_pb2.DecodeReport | None = None
        self._finished_sent = 0
        self._report_sent = False

    def add(self, event: Tokens | Finished | Usage, token_bytes: TokenBytes, replica_id: str, now: float) -> None:
        """An event of the engine."""
        match event:
            case Tokens():
                self._choices[event.choice].add(tokens_to_wire(event, token_bytes))
                self.begun = True
            case Finished():
                self._finished.append(finished_to_wire(event, replica_id))
                self._broken = self._broken or event.reason not in _WHOLE
            case Usage():
                self._report = self._make_report(event)
                self.ended_at = now

    @property
    def delivered(self) -> bool:
        """The report went out: nothing is left to send."""
        return self._report_sent

    def take(self) -> decode_pb2.RequestEvents | None:
        """What has come since the last call; None for nothing."""
        tokens = [event for choice in self._choices for event in choice.unsent()]
        self._shrink()
        finished = self._finished[self._finished_sent :]
        self._finished_sent = len(self._finished)
        report = None if self._report_sent else self._report
        self._report_sent = self._report_sent or report is not None
        if not tokens and not finished and report is None:
            return None
        return decode_pb2.RequestEvents(id=attempt_id(self.key), tokens=tokens, finished=finished, report=report)

    def rewind(self, received: Sequence[int]) -> bool:
        """A new stream: send again what follows `received` tokens of each choice, and every end. False when that cannot
        be done, since it is forgotten."""
        for index, choice in enumerate(self._choices):
            got = received[index] if index < len(received) else 0
            if not choice.go_back(len(choice.start.delivered) + got):
                return False
        self._finished_sent = 0
        self._report_sent = False
        return True

    def adopt(self, router: str, offsets: Sequence[int], now: float) -> decode_pb2.AdoptResponse | None:
        """Hand the request to another router whose client has `offsets` tokens of each choice. None when it cannot go
        on from there: nothing of it has come yet, it failed or was cancelled, or events are forgotten."""
        if not self.begun or self._broken or self.cancelled or len(offsets) != len(self._choices):
            return None
        known = [choice.ids_before(offset) for choice, offset in zip(self._choices, offsets, strict=True)]
        received = [offset - len(choice.start.delivered) for choice, offset in zip(self._choices, offsets, strict=True)]
        if any(ids is None for ids in known) or min(received) < 0 or not self.rewind(received):
            return None
        self.router, self.renewed_at, self.adopted = router, now, True
        states = [
            common_pb2.ChoiceState(choice=index, delivered_token_ids=ids or ()) for index, ids in enumerate(known)
        ]
        return decode_pb2.AdoptResponse(id=attempt_id(self.key), choices=states, received_tokens=received)

    def _shrink(self) -> None:
        over = sum(choice.tokens for choice in self._choices) - self._most_tokens
        if over <= 0:
            return
        for choice in sorted(self._choices, key=lambda each: -each.tokens):
            if over <= 0:
                return
            before = choice.tokens
            choice.forget(over)
            over -= before - choice.tokens

    def _make_report(self, usage: Usage) -> decode_pb2.DecodeReport:
        counts, timings = usage.counts, usage.timings
        if not self.prefill.ByteSize():
            self.prefill = prefill_pb2.PrefillReport(
                cached_tokens=counts.cached,
                loaded_tokens=counts.loaded,
                computed_tokens=counts.computed,
                recomputed_tokens=counts.recomputed,
            )
        return decode_pb2.DecodeReport(
            prefill=self.prefill,
            usage=common_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=counts.cached,
                loaded_tokens=counts.loaded,
                computed_tokens=counts.computed,
                recomputed_tokens=counts.recomputed,
                completion_tokens=usage.completion_tokens,
                image_tokens=self._image_tokens,
            ),
            preemptions=usage.preemptions,
            wait_us=microseconds(timings.wait_s),
            verify_us=microseconds(timings.verify_s),
            decode_us=microseconds(timings.work_s),
        )


def _merged(events: Sequence[common_pb2.TokensEvent]) -> common_pb2.TokensEvent | None:
    """Neighbouring events as one."""
    if len(events) < 2:
        return events[0] if events else None
    merged = common_pb2.TokensEvent()
    merged.CopyFrom(events[0])
    for event in events[1:]:
        merged.token_ids.extend(event.token_ids)
        merged.logprobs.extend(event.logprobs)
        merged.text += event.text
    return merged
