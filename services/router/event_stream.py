"""Decode's events as the client's: order, terminal events, what is an error status and what an event (L28).

Attempts come and go; what the client gets is numbered here. An attempt continues what is known of its choices, and an
event that is of an older one, or of tokens that the client has, does not pass (L15, L16).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.services.router.attach import Overtaken
from headrace.services.router.parts import Part
from headrace.services.router.place import Placed
from headrace.services.router.report import RequestLog
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import (
    DeadlineExceeded,
    HeadraceError,
    Internal,
    InvalidArgument,
    Unavailable,
    from_proto,
    to_proto,
)
from headrace.v1 import common_pb2, decode_pb2, inference_pb2, prefill_pb2


class EventStream:
    """Decode's events as the client's: started once, one terminal event per choice, usage, report (L28)."""

    def __init__(
        self,
        placed: Placed,
        log: RequestLog,
        wants_report: bool,
        clock: Clock,
        *,
        name: str,
        received: Mapping[int, int] | None = None,
    ) -> None:
        """`name`: the request's id as the client knows it. `received`: tokens that the client has of each choice, when
        it resumes."""
        self._placed = placed
        self._log = log
        self._wants_report = wants_report
        self._clock = clock
        self._name = name
        choices = range(placed.routing.choices)
        self._open = set(choices)
        self._received = dict.fromkeys(choices, 0) | dict(received or {})
        self._known: dict[int, list[int]] = {choice: [] for choice in choices}
        self._attempts: dict[int, int] = {}
        """By choice, the attempt that brings it."""
        self._totals: dict[int, int] = {}
        """Tokens of the choices that have ended."""
        self._origins: tuple[int, int, int] | None = None
        self._recomputed = 0
        self._last = decode_pb2.DecodeReport()
        self.started = False
        """Something has reached the client; errors travel as events from now on."""

    @property
    def open(self) -> tuple[int, ...]:
        """Choices that have not ended."""
        return tuple(sorted(self._open))

    @property
    def known(self) -> Mapping[int, Sequence[int]]:
        """Tokens of each choice that the client has, or is about to get: what a continuation starts from."""
        return self._known

    def begin(self, part: Part) -> None:
        """From now on the part's choices come from its newest attempt."""
        for choice in part.choices:
            self._attempts[choice] = part.attempt

    def adopt(self, states: Sequence[common_pb2.ChoiceState]) -> None:
        """An attempt that was found goes on after these tokens, which the client has."""
        for state in states:
            self._known[state.choice] = list(state.delivered_token_ids)

    def translate(self, step: decode_pb2.RequestEvents, part: Part) -> list[inference_pb2.GenerateResponse]:
        """What one step brings the client, in order.

        Raises what ended the attempt, of whose last step nothing is passed on then: tokens that were held back for a
        stop string are not to be seen, as the continuation may complete it.
        """
        current = [choice for choice in part.choices if self._attempts.get(choice) == part.attempt]
        for finished in step.finished:
            choice = part.choices[finished.choice]
            if choice in self._open and choice in current:
                self._check(finished)
        out: list[inference_pb2.GenerateResponse] = []
        for tokens in step.tokens:
            choice = part.choices[tokens.choice]
            if choice in self._open and choice in current:
                tokens.choice = choice
                out += self._tokens(tokens)
        for finished in step.finished:
            choice = part.choices[finished.choice]
            if choice in self._open and choice in current:
                finished.choice = choice
                out += self._finish(finished)
        if step.HasField("report"):
            usage = step.report.usage
            self._count(usage.cached_tokens, usage.loaded_tokens, usage.computed_tokens, usage.recomputed_tokens)
            self._last = step.report
        return out

    def lost(self, prefill: prefill_pb2.PrefillReport | None) -> None:
        """An attempt failed. `prefill`: what was computed for it, where that is known (L27)."""
        if prefill is None:
            return
        self._count(prefill.cached_tokens, prefill.loaded_tokens, prefill.computed_tokens, prefill.recomputed_tokens)
        self._last = decode_pb2.DecodeReport(prefill=prefill)

    def failed(self, error: HeadraceError, choices: Sequence[int]) -> list[inference_pb2.GenerateResponse]:
        """Terminal events for those of the choices that are open."""
        deadline = isinstance(error, DeadlineExceeded)
        out = self._start()
        for choice in sorted(self._open.intersection(choices)):
            out += self._finish(
                common_pb2.FinishedEvent(
                    choice=choice,
                    reason=common_pb2.FINISH_REASON_DEADLINE if deadline else common_pb2.FINISH_REASON_ERROR,
                    completion_tokens=len(self._known[choice]),
                    error=None if deadline else to_proto(error),
                )
            )
        return out

    def end(self) -> list[inference_pb2.GenerateResponse]:
        """The usage record, and the report if asked: after the last terminal event.

        The prompt's tokens are those of the first attempt whose account is known; what later ones computed was computed
        again (L27). Prompt tokens that are not known to have been cached or loaded were computed.
        """
        prompt = self._placed.routing.prompt_tokens
        cached, loaded, _ = self._origins or (0, 0, 0)
        usage = common_pb2.Usage(
            prompt_tokens=prompt,
            cached_tokens=cached,
            loaded_tokens=loaded,
            computed_tokens=prompt - cached - loaded,
            recomputed_tokens=self._recomputed,
            completion_tokens=sum(self._totals.values()),
            image_tokens=self._placed.image_tokens,
        )
        out = [inference_pb2.GenerateResponse(usage=usage)]
        if self._wants_report:
            seed, now = self._placed.spec.sampling.seed, self._clock.monotonic()
            report = self._log.report(self._name, seed, self._last, usage, now)
            out.append(inference_pb2.GenerateResponse(report=report))
        return out

    # --- inside ------------------------------------------------------------------------------------------------

    def _check(self, finished: common_pb2.FinishedEvent) -> None:
        """Raises what ended the attempt and not the choice. Before the first token, errors are statuses."""
        early = not self.started and not any(self._known.values())
        if finished.reason == common_pb2.FINISH_REASON_ERROR:
            raise from_proto(finished.error)
        if finished.reason == common_pb2.FINISH_REASON_CANCELLED:
            if finished.error.code == common_pb2.ERROR_CODE_ABORTED:
                raise Overtaken(finished.error.message)
            # Not by the client: with its cancel nobody follows the attempt any more.
            raise Unavailable(f"decode ended the request: {finished.error.message or 'somebody cancelled it there'}")
        if finished.reason == common_pb2.FINISH_REASON_DEADLINE and early:
            raise DeadlineExceeded("the deadline passed before the first token")

    def _tokens(self, tokens: common_pb2.TokensEvent) -> list[inference_pb2.GenerateResponse]:
        known, end = self._known[tokens.choice], tokens.offset + len(tokens.token_ids)
        if end <= len(known):
            return []
        if tokens.offset != len(known):
            raise Internal(f"an attempt continues at token {tokens.offset}, {len(known)} are known; trying again")
        received = self._received[tokens.choice]
        if tokens.offset < received < end:
            raise InvalidArgument(
                f"choice {tokens.choice}: {received} is inside an event of tokens {tokens.offset} to {end}; name the "
                "end of the last event that came",
                field="resume",
            )
        known.extend(tokens.token_ids)
        if end <= received:
            self._recomputed += len(tokens.token_ids)
            return []
        self._log.delivered(tokens, self._clock.monotonic())
        return [*self._start(), inference_pb2.GenerateResponse(tokens=tokens)]

    def _finish(self, finished: common_pb2.FinishedEvent) -> list[inference_pb2.GenerateResponse]:
        self._open.discard(finished.choice)
        self._totals[finished.choice] = finished.completion_tokens
        return [*self._start(), inference_pb2.GenerateResponse(finished=finished)]

    def _count(self, cached: int, loaded: int, computed: int, recomputed: int) -> None:
        if self._origins is None:
            self._origins = (cached, loaded, computed)
        else:
            self._recomputed += computed
        self._recomputed += recomputed

    def _start(self) -> list[inference_pb2.GenerateResponse]:
        if self.started:
            return []
        self.started = True
        spec = self._placed.spec
        started = inference_pb2.StartedEvent(
            request_id=self._name,
            model=spec.model,
            seed=spec.sampling.seed,
            prompt_tokens=spec.prompt_tokens,
        )
        return [inference_pb2.GenerateResponse(started=started)]
