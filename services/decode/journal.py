"""What one request has brought and its router has not yet taken. No RPC, no clock of its own.

Tokens are kept until the router says that it has them, so that a new stream can go on where the old one broke. The
credit bounds how many that can be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.messages import Finished, Tokens, Usage
from headrace.engine.request import RequestKey
from headrace.services.worker.events_wire import TokenBytes, finished_to_wire, microseconds, tokens_to_wire
from headrace.services.worker.spec_wire import attempt_id
from headrace.v1 import common_pb2, decode_pb2, prefill_pb2


@dataclass
class _Choice:
    """Events of one choice: [first, first + len(kept)) of all that there were; `sent` of them went out."""

    kept: list[common_pb2.TokensEvent] = field(default_factory=list)
    sent: int = 0

    def unsent(self) -> common_pb2.TokensEvent | None:
        """All that waits, as one event."""
        waiting = self.kept[self.sent :]
        self.sent = len(self.kept)
        if len(waiting) < 2:
            return waiting[0] if waiting else None
        merged = common_pb2.TokensEvent()
        merged.CopyFrom(waiting[0])
        for event in waiting[1:]:
            merged.token_ids.extend(event.token_ids)
            merged.logprobs.extend(event.logprobs)
            merged.text += event.text
        return merged

    def received(self, offset: int) -> None:
        """The router has all tokens before `offset`: forget them; send what follows (again)."""
        self.kept = [event for event in self.kept if event.offset + len(event.token_ids) > offset]
        self.sent = 0


class RequestJournal:
    """Events of one attempt, in order, towards one router."""

    def __init__(self, key: RequestKey, router: str, starts: tuple[int, ...], image_tokens: int) -> None:
        """`starts`: tokens of each choice that earlier attempts delivered."""
        self.key = key
        self.router = router
        self.prefill = prefill_pb2.PrefillReport()
        """As the commit brought it; of a prompt that was computed here, as the engine counted it."""
        self.credit = 0
        self.ended_at: float | None = None
        """When the request ended here."""
        self._starts = starts
        self._image_tokens = image_tokens
        self._choices = [_Choice() for _ in starts]
        self._finished: list[common_pb2.FinishedEvent] = []
        self._report: decode_pb2.DecodeReport | None = None
        self._finished_sent = 0
        self._report_sent = False

    def add(self, event: Tokens | Finished | Usage, token_bytes: TokenBytes, replica_id: str, now: float) -> None:
        """An event of the engine."""
        match event:
            case Tokens():
                self._choices[event.choice].kept.append(tokens_to_wire(event, token_bytes))
            case Finished():
                self._finished.append(finished_to_wire(event, replica_id))
            case Usage():
                self._report = self._make_report(event)
                self.ended_at = now

    @property
    def delivered(self) -> bool:
        """The report went out: nothing is left to send."""
        return self._report_sent

    def take(self) -> decode_pb2.RequestEvents | None:
        """What has come since the last call; None for nothing."""
        tokens = [event for choice in self._choices if (event := choice.unsent()) is not None]
        finished = self._finished[self._finished_sent :]
        self._finished_sent = len(self._finished)
        report = None if self._report_sent else self._report
        self._report_sent = self._report_sent or report is not None
        if not tokens and not finished and report is None:
            return None
        return decode_pb2.RequestEvents(id=attempt_id(self.key), tokens=tokens, finished=finished, report=report)

    def rewind(self, received: tuple[int, ...]) -> None:
        """A new stream: send again what follows `received` tokens of each choice, and every end."""
        for index, choice in enumerate(self._choices):
            got = received[index] if index < len(received) else 0
            choice.received(self._starts[index] + got)
        self._finished_sent = 0
        self._report_sent = False

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
