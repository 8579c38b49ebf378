"""One request as its client sees it, held against its right answer; and the books of all requests.

Pure: events go in, violations come out as text (L5, L11, L15, L27, L28).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.v1 import common_pb2, inference_pb2

LogProb = tuple[int, float, tuple[tuple[int, float], ...]]


@dataclass
class Answer:
    """What a request brings."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[LogProb]] = field(default_factory=dict)
    ends: dict[int, tuple[int, int, str]] = field(default_factory=dict)
    """Choice → finish reason, tokens, stop string."""

    @property
    def count(self) -> int:
        """Tokens of all choices."""
        return sum(len(tokens) for tokens in self.tokens.values())


GOOD_ENDS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


class Watch:
    """One request. `take` every event, `resumed` when a new stream goes on; then `complete` or not, `check_end`."""

    def __init__(self, choices: int, known: Answer | None) -> None:
        """`known`: the right answer; None while it is being found."""
        self.choices = choices
        self.known = known
        self.seen = Answer()
        self.event_errors: list[str] = []
        self.wrong: list[str] = []
        self.started = False
        """Of the present stream."""
        self.accepted = False
        """Some event has come."""
        self.usage: common_pb2.Usage | None = None
        self.report: inference_pb2.RequestReport | None = None
        self.errors: list[common_pb2.Error] = []
        """Of choices that ended with one."""
        self._former_ends: dict[int, tuple[int, int, str]] = {}

    @property
    def complete(self) -> bool:
        """Every choice has ended, and the usage record has come."""
        return len(self.seen.ends) == self.choices and self.usage is not None

    @property
    def reasons(self) -> set[int]:
        return {reason for reason, _, _ in self.seen.ends.values()}

    def resumed(self) -> None:
        """Its stream was lost; the next one goes on after the tokens that are here, and tells every end again."""
        self._former_ends.update(self.seen.ends)
        self.seen.ends, self.usage, self.report, self.started = {}, None, None, False

    def resume_points(self) -> list[inference_pb2.ResumePoint]:
        return [
            inference_pb2.ResumePoint(choice=choice, resume_offset=len(tokens))
            for choice, tokens in self.seen.tokens.items()
        ]

    def take(self, event: inference_pb2.GenerateResponse) -> None:
        self.accepted = True
        if self.usage is not None and not event.HasField("report"):
            self._error(f"{event.WhichOneof('event')} after the usage record")
        if event.HasField("started"):
            if self.started:
                self._error("started twice")
            self.started = True
            return
        if not self.started:
            self._error(f"{event.WhichOneof('event')} before the start")
        if event.HasField("tokens"):
            self._tokens(event.tokens)
        elif event.HasField("finished"):
            self._finished(event.finished)
        elif event.HasField("usage"):
            self.usage = event.usage
        elif event.HasField("report"):
            if self.report is not None:
                self._error("two reports")
            self.report = event.report

    def check_end(self) -> None:
        """What only the whole answer shows. For a request that ended well."""
        seen, known, usage = self.seen, self.known, self.usage
        for choice in range(self.choices):
            if choice not in seen.ends:
                self._error(f"choice {choice} has no terminal event")
        if usage is None:
            self._error("no usage record")
        elif usage.completion_tokens != seen.count:
            self._error(f"usage tells {usage.completion_tokens} tokens, {seen.count} came")
        elif usage.cached_tokens + usage.loaded_tokens + usage.computed_tokens != usage.prompt_tokens:
            self._error(f"the prompt's tokens do not add up: {usage}".replace("\n", " "))
        if known is None:
            return
        for name in ("tokens", "text", "logprobs", "ends"):
            if getattr(seen, name) != getattr(known, name):
                self._differs(f"{name}: {getattr(seen, name)} instead of {getattr(known, name)}")

    # --- inside ------------------------------------------------------------------------------------------------

    def _error(self, what: str) -> None:
        self.event_errors.append(what)

    def _differs(self, what: str) -> None:
        self.wrong.append(what[:500])

    def _tokens(self, event: common_pb2.TokensEvent) -> None:
        choice, seen = event.choice, self.seen
        if choice >= self.choices:
            self._error(f"choice {choice} of {self.choices}")
        if choice in seen.ends or choice in self._former_ends:
            self._error(f"choice {choice}: tokens after its terminal event")
        have = seen.tokens.setdefault(choice, [])
        if event.offset != len(have):
            self._error(f"choice {choice}: offset {event.offset} after {len(have)} tokens")
        if self.known is not None:
            right = self.known.tokens.get(choice, [])[event.offset : event.offset + len(event.token_ids)]
            if right != list(event.token_ids):
                self._differs(f"choice {choice} at {event.offset}: {list(event.token_ids)} instead of {right}")
        have.extend(event.token_ids)
        seen.text[choice] = seen.text.get(choice, "") + event.text
        seen.logprobs.setdefault(choice, []).extend(
            (at.chosen.token_id, at.chosen.logprob, tuple((one.token_id, one.logprob) for one in at.top))
            for at in event.logprobs
        )

    def _finished(self, event: common_pb2.FinishedEvent) -> None:
        choice, seen = event.choice, self.seen
        if choice >= self.choices:
            self._error(f"choice {choice} of {self.choices}")
        if choice in seen.ends:
            self._error(f"choice {choice}: a second terminal event")
        have = len(seen.tokens.setdefault(choice, []))
        seen.text.setdefault(choice, "")
        seen.logprobs.setdefault(choice, [])
        if event.completion_tokens != have:
            self._error(f"choice {choice}: its end tells {event.completion_tokens} tokens, {have} came")
        if event.reason == common_pb2.FINISH_REASON_UNSPECIFIED:
            self._error(f"choice {choice}: no finish reason")
        end = (int(event.reason), event.completion_tokens, event.stop_string)
        former = self._former_ends.get(choice)
        if former is not None and former[0] in GOOD_ENDS and former != end:
            self._error(f"choice {choice}: ended as {former}, and as {end} when resumed")
        seen.ends[choice] = end
        if event.HasField("error") and event.reason == common_pb2.FINISH_REASON_ERROR:
            self.errors.append(event.error)


class Outcome(StrEnum):
    """How a request ended, as its client counts."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"
    REFUSED = "refused"
    """At the door: never accepted."""


class Books:
    """All requests by name: those that are open, and how the others ended. L11: none is lost, none ends twice."""

    def __init__(self) -> None:
        self._accepted: set[str] = set()
        self.open: set[str] = set()
        self.ended: dict[str, Outcome] = {}
        self.errors: list[str] = []

    def opened(self, name: str) -> None:
        if name in self.open or name in self.ended:
            self.errors.append(f"{name} was asked twice")
        self.open.add(name)

    def accepted(self, name: str) -> None:
        """Some event of it came, or the router said how it ended after taking it."""
        self._accepted.add(name)

    def closed(self, name: str, outcome: Outcome) -> None:
        if name not in self.open:
            self.errors.append(f"{name} ended ({outcome}) and was not open")
        if outcome is Outcome.REFUSED and name in self._accepted:
            self.errors.append(f"{name} was accepted and then refused")
        if outcome is not Outcome.REFUSED:
            self._accepted.add(name)
        self.open.discard(name)
        self.ended[name] = outcome

    @property
    def counts(self) -> dict[str, int]:
        """accepted, and every outcome."""
        ends = Counter(self.ended.values())
        return {"accepted": len(self._accepted)} | {outcome.value: ends[outcome] for outcome in Outcome}

    def problems(self) -> list[str]:
        """At the end, when nobody asks any more."""
        counts = self.counts
        ended = sum(counts[each] for each in ("finished", "cancelled", "deadline", "failed"))
        found = list(self.errors)
        if counts["accepted"] != ended:
            found.append(f"{counts['accepted']} accepted, {ended} ended")
        return found + [f"{name} never ended" for name in sorted(self.open)]
