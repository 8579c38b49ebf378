"""Decode's events as the client's: order, terminal events, what is an error status and what an event (L28)."""

from __future__ import annotations

from headrace.services.router.place import Placed
from headrace.services.router.report import RequestLog
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import Cancelled, DeadlineExceeded, HeadraceError, from_proto, to_proto
from headrace.v1 import common_pb2, decode_pb2, inference_pb2, prefill_pb2


class EventStream:
    """Decode's events as the client's: started once, one terminal event per choice, usage, report (L28)."""

    def __init__(self, placed: Placed, log: RequestLog, wants_report: bool, clock: Clock) -> None:
        self._placed = placed
        self._log = log
        self._wants_report = wants_report
        self._clock = clock
        self._open = set(range(placed.routing.choices))
        self._delivered = dict.fromkeys(range(placed.routing.choices), 0)
        self.started = False
        """Something has reached the client; errors travel as events from now on."""

    def translate(self, step: decode_pb2.RequestEvents) -> list[inference_pb2.GenerateResponse]:
        """What one step brings the client, in order. Raises what ended the request before anything of it was sent."""
        if not self.started and not step.tokens:
            for finished in step.finished:
                _raise_early(finished)
        out = self._start() if step.tokens or step.finished else []
        for tokens in step.tokens:
            self._log.delivered(tokens, self._clock.monotonic())
            self._delivered[tokens.choice] += len(tokens.token_ids)
            out.append(inference_pb2.GenerateResponse(tokens=tokens))
        for finished in step.finished:
            if finished.choice in self._open:
                self._open.discard(finished.choice)
                out.append(inference_pb2.GenerateResponse(finished=finished))
        if step.HasField("report"):
            usage = self._log.usage(step.report, self._placed.image_tokens)
            out.append(inference_pb2.GenerateResponse(usage=usage))
            if self._wants_report:
                out.append(inference_pb2.GenerateResponse(report=self._report(step.report, usage)))
        return out

    def failed(self, error: HeadraceError, prefill: prefill_pb2.PrefillReport) -> list[inference_pb2.GenerateResponse]:
        """Terminal events for the choices that are open; the usage is prefill's and what was delivered (L27).

        Prompt tokens that are not known to have been cached or loaded were computed.
        """
        deadline = isinstance(error, DeadlineExceeded)
        out = []
        for choice in sorted(self._open):
            finished = common_pb2.FinishedEvent(
                choice=choice,
                reason=common_pb2.FINISH_REASON_DEADLINE if deadline else common_pb2.FINISH_REASON_ERROR,
                completion_tokens=self._delivered[choice],
                error=None if deadline else to_proto(error),
            )
            out.append(inference_pb2.GenerateResponse(finished=finished))
        self._open.clear()
        usage = common_pb2.Usage(
            prompt_tokens=self._placed.routing.prompt_tokens,
            cached_tokens=prefill.cached_tokens,
            loaded_tokens=prefill.loaded_tokens,
            computed_tokens=self._placed.routing.prompt_tokens - prefill.cached_tokens - prefill.loaded_tokens,
            recomputed_tokens=prefill.recomputed_tokens,
            completion_tokens=sum(self._delivered.values()),
            image_tokens=self._placed.image_tokens,
        )
        out.append(inference_pb2.GenerateResponse(usage=usage))
        if self._wants_report:
            decode = decode_pb2.DecodeReport(prefill=prefill, usage=usage)
            out.append(inference_pb2.GenerateResponse(report=self._report(decode, usage)))
        return out

    def _start(self) -> list[inference_pb2.GenerateResponse]:
        if self.started:
            return []
        self.started = True
        spec = self._placed.spec
        started = inference_pb2.StartedEvent(
            request_id=spec.id.request_id,
            model=spec.model,
            seed=spec.sampling.seed,
            prompt_tokens=spec.prompt_tokens,
        )
        return [inference_pb2.GenerateResponse(started=started)]

    def _report(self, decode: decode_pb2.DecodeReport, usage: common_pb2.Usage) -> inference_pb2.RequestReport:
        spec = self._placed.spec
        return self._log.report(spec.id.request_id, spec.sampling.seed, decode, usage, self._clock.monotonic())


def _raise_early(finished: common_pb2.FinishedEvent) -> None:
    """Errors before the first event are statuses (spec/protocol.md, "Events to the client")."""
    if finished.reason == common_pb2.FINISH_REASON_DEADLINE:
        raise DeadlineExceeded("the deadline passed before the first token")
    if finished.reason == common_pb2.FINISH_REASON_CANCELLED:
        raise Cancelled("the request was cancelled before the first token")
    if finished.reason == common_pb2.FINISH_REASON_ERROR:
        raise from_proto(finished.error)
