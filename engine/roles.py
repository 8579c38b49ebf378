"""What a role adds to an engine, and the role that serves a request from prompt to last token.

whole      Submit: compute the prompt here, decode here
prefill    engine/prefill.py: compute the prompt, hand rows, slot and first token over
decode     engine/decode.py: reserve, take the prompt over, decode
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.ledger import request_reason
from headrace.engine.live import LiveRequest
from headrace.engine.messages import Command, EngineStatus, Finished, FinishReason, Submit, Usage
from headrace.engine.output import ChoiceOutput, Ending
from headrace.engine.request import EngineRequest
from headrace.engine.scheduler import Chunk
from headrace.engine.sequence import SampledToken, Sequence

if TYPE_CHECKING:
    from headrace.engine.core import Engine


class Role(ABC):
    """The part of an engine that differs between whole, prefill and decode."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @abstractmethod
    def handle(self, command: Command[object]) -> object:
        """Carry out a command of this role. Raises EngineError FAILED_PRECONDITION for another role's."""

    def admitted(self, sequence: Sequence) -> None:  # noqa: B027 - most roles have nothing to say here
        """A queued sequence got its memory, perhaps with a cached prefix."""

    @abstractmethod
    def computed(self, chunk: Chunk, tokens: tuple[SampledToken, ...]) -> None:
        """A chunk's rows are final and committed; `tokens` are those sampled for `chunk.choices`."""

    @abstractmethod
    def ended(self, live: LiveRequest, reason: FinishReason, error: EngineError | None) -> None:
        """The engine took the request's memory: emit what terminal events are missing and close it in the ledger."""

    def problems(self) -> tuple[str, ...]:
        """Broken invariants of what the role keeps besides the engine's state (L11)."""
        return ()

    def idle(self) -> bool:
        """Whether what the role keeps is empty."""
        return True

    def report(self, status: EngineStatus) -> EngineStatus:
        """Fill in what the role alone knows."""
        return status

    def lost(self, sequence: Sequence, error: EngineError) -> None:
        """A preempted sequence cannot come back on this worker."""
        self.engine.end(sequence.live, FinishReason.ERROR, error)

    def refuse(self, command: Command[object]) -> EngineError:
        return EngineError(
            ErrorCode.FAILED_PRECONDITION,
            f"{type(command).__name__} is not for a {type(self).__name__}; send it to a worker of the right role",
        )


class WholeRole(Role):
    """Prompt to last token in one engine; also the emitting half of decode."""

    def handle(self, command: Command[object]) -> object:
        if not isinstance(command, Submit):
            raise self.refuse(command)
        request = command.request
        if self.engine.ledger.get(request.key) is not None:
            raise EngineError(ErrorCode.ABORTED, f"{request.key} is running already")
        longest = request.prompt_length + request.max_tokens
        live = self.engine.prepare(request, width=request.n, longest=longest, computes=True)
        self.engine.scheduler.require_queue_space()
        live.sequences[0].out = self.output_of(request, 0)
        self.engine.ledger.open(live)
        self.engine.scheduler.enqueue(live.sequences[0])
        return None

    def output_of(self, request: EngineRequest, choice: int) -> ChoiceOutput:
        engine = self.engine
        return ChoiceOutput(
            request,
            choice,
            tokenizer=engine.tokenizer,
            eos_token_ids=engine.model.eos_token_ids,
            context_tokens=engine.model.context_tokens,
        )

    def computed(self, chunk: Chunk, tokens: tuple[SampledToken, ...]) -> None:
        live = chunk.sequence.live
        if chunk.sequence.is_leader and chunk.end == live.prompt_length:
            self.fork(live)
        for choice, token in zip(chunk.choices, tokens, strict=True):
            self.take_token(live.sequences[choice], token)

    def fork(self, live: LiveRequest) -> None:
        """Every choice becomes a sequence of its own and runs."""
        self.engine.memory.fork(live)
        for sequence in live.sequences[1:]:
            sequence.out = self.output_of(live.request, sequence.choice)
            self.engine.scheduler.run(sequence)

    def take_token(self, sequence: Sequence, token: SampledToken) -> None:
        """Append a sampled token, emit what it releases, and end the choice if it was the last."""
        assert sequence.out is not None
        sequence.output.append(token.token_id)
        sequence.live.sampled += 1
        event, ending = sequence.out.accept(token)
        if event is not None:
            self.engine.emit(event)
        if ending is not None:
            self.engine.drop(sequence)
            self._finish(sequence.live, sequence.choice, ending)

    def ended(self, live: LiveRequest, reason: FinishReason, error: EngineError | None) -> None:
        for choice in range(live.request.n):
            if choice not in live.reasons:
                self._cut_off(live, choice, reason, error)

    def lost(self, sequence: Sequence, error: EngineError) -> None:
        if sequence.is_leader:
            super().lost(sequence, error)
            return
        self.engine.drop(sequence)
        self._cut_off(sequence.live, sequence.choice, FinishReason.ERROR, error)

    def _cut_off(self, live: LiveRequest, choice: int, reason: FinishReason, error: EngineError | None) -> None:
        """End a choice from outside: show what was held back, then the terminal event."""
        out = live.sequences[choice].out if choice < len(live.sequences) else None
        event = None if out is None else out.flush()
        if event is not None:
            self.engine.emit(event)
        self._finish(live, choice, Ending(reason), error)

    def _finish(self, live: LiveRequest, choice: int, ending: Ending, error: EngineError | None = None) -> None:
        """The one terminal event of a choice, and after the last the usage record (L28)."""
        out = live.sequences[choice].out if choice < len(live.sequences) else None
        length = len(live.request.delivered_to(choice)) if out is None else out.length
        live.reasons[choice] = ending.reason
        live.completion_tokens += length
        self.engine.emit(Finished(live.key, choice, ending.reason, length, ending.stop_match, error))
        if live.ended:
            timings = live.timings(self.engine.clock())
            usage = Usage(live.key, live.prompt_length, live.completion_tokens, live.counts, live.preemptions, timings)
            self.engine.emit(usage)
            self.engine.ledger.close(live, request_reason(live))
