"""A client's constraint: checked and made what workers compile, or refused with the reason before it is accepted.

Schemas and structural tags are translated in a process of their own, which is killed when it takes too long; what came
of them is kept, refusals too. Expressions and grammars are judged by the workers, which refuse them at the reservation.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from headrace.engine.isolated import CannotStart, Isolated, Refused, TimeUp
from headrace.engine.text.constraint import MOST_AFTER, from_choices, from_grammar, from_regex, json_object
from headrace.engine.text.errors import TextError
from headrace.services.router.model import ServedModel
from headrace.services.router.prepare import Prepared
from headrace.services.router.settings import RequestSection
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import InvalidArgument, ResourceExhausted, Unavailable
from headrace.v1 import common_pb2, inference_pb2

CHILD = "headrace.engine.text.constraint_child"
END_OF_REASONING = "</think>"
MOST_KNOWN_BYTES = 32 << 20
MOST_SCHEMA_BYTES = 256 * 1024
MOST_WAITING = 64
MEMORY_BYTES = 1 << 30
RETRY_AFTER_S = 0.5
TRANSLATION_S = 10.0
"""Longest translation."""
TOO_LONG_S = 60.0
"""How long one that took too long is refused unseen."""


@dataclass(frozen=True)
class _Found:
    """What came of a translation."""

    text: str = ""
    refused: str = ""
    until: float = float("inf")


class Constraints:
    """Belongs to the event loop's thread."""

    def __init__(self, model: ServedModel, limits: RequestSection, clock: Clock) -> None:
        self._clock = clock
        self._model = model
        self._limits = limits
        self._process = Isolated(CHILD, memory_bytes=MEMORY_BYTES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        self._known: OrderedDict[tuple[str, str], _Found] = OrderedDict()
        self._bytes = 0
        self._waiting = 0

    def close(self) -> None:
        """End the process, if one was started."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.close()

    async def complete(self, prepared: Prepared, request: inference_pb2.GenerateRequest) -> Prepared:
        """With the constraint as workers take it: a grammar, an expression or an exact structural tag, and the tokens
        behind which it begins. Raises InvalidArgument, ResourceExhausted, Unavailable."""
        if not request.HasField("constraint"):
            return prepared
        asked = request.constraint
        form = asked.WhichOneof("language")
        if form is None:
            raise InvalidArgument("names no language", field="constraint")
        if self._model.text is None:
            raise InvalidArgument("this model has no tokenizer, which a constraint needs", field="constraint")
        if request.stop.ignore_eos:
            raise InvalidArgument(
                "a constrained output ends where its language does; leave it unset", field="stop.ignore_eos"
            )
        made = common_pb2.Constraint(after_token_ids=self._after(request))
        field = f"constraint.{form}"
        try:
            match form:
                case "json_object":
                    if not asked.json_object:
                        raise InvalidArgument("must be true where it is given", field=field)
                    made.grammar = json_object().text
                case "choices":
                    made.grammar = from_choices(asked.choices.values).text
                case "grammar":
                    made.grammar = from_grammar(asked.grammar).text
                case "regex":
                    made.regex = from_regex(asked.regex).text
                case "json_schema":
                    made.grammar = await self._translated(form, asked.json_schema)
                case "structural_tag":
                    made.structural_tag = await self._translated(form, asked.structural_tag)
        except TextError as error:
            raise InvalidArgument(str(error), field=field) from error
        return replace(prepared, constraint=made)

    def _after(self, request: inference_pb2.GenerateRequest) -> tuple[int, ...]:
        asked = request.constraint
        assert self._model.text is not None
        if len(asked.after_token_ids) > MOST_AFTER:
            raise InvalidArgument(f"at most {MOST_AFTER} tokens are taken", field="constraint.after_token_ids")
        if any(token >= self._model.vocab_size for token in asked.after_token_ids):
            raise InvalidArgument(
                f"names a token outside the vocabulary of {self._model.vocab_size}", field="constraint.after_token_ids"
            )
        if not asked.after_reasoning:
            return tuple(asked.after_token_ids)
        field = "constraint.after_reasoning"
        if asked.after_token_ids:
            raise InvalidArgument("stands beside after_token_ids; give one of them", field=field)
        end = self._model.text.tokenizer.specials.get(END_OF_REASONING)
        if end is None:
            message = f"this model has no token {END_OF_REASONING}; say with after_token_ids how its reasoning ends"
            raise InvalidArgument(message, field=field)
        if request.prompt.WhichOneof("form") == "chat":
            chat = request.prompt.chat
            if not (chat.thinking if chat.HasField("thinking") else self._limits.thinking):
                return ()  # the prompt has ended the reasoning
        return (end,)

    async def _translated(self, form: str, text: str) -> str:
        if len(text.encode()) > MOST_SCHEMA_BYTES:
            raise InvalidArgument(f"is longer than {MOST_SCHEMA_BYTES} bytes", field=f"constraint.{form}")
        found = self._known.get((form, text))
        if found is None or found.until <= self._clock.monotonic():
            if self._waiting >= MOST_WAITING:
                raise ResourceExhausted("too many constraints wait to be translated", retry_after_s=RETRY_AFTER_S)
            self._waiting += 1
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._translate, form, text)
            work.add_done_callback(self._done)
            # Cancelling the wait (the client has left) must not take the place in the queue out of the count.
            found = await asyncio.shield(work)
            self._keep(form, text, found)
        else:
            self._known.move_to_end((form, text))
        if found.refused:
            raise InvalidArgument(found.refused, field=f"constraint.{form}")
        return found.text

    def _done(self, work: asyncio.Future[_Found]) -> None:
        self._waiting -= 1
        if not work.cancelled():
            work.exception()

    def _translate(self, form: str, text: str) -> _Found:
        """On the thread."""
        frame = json.dumps({"form": form, "text": text}).encode()
        try:
            return _Found(self._process.call(frame, limit_s=TRANSLATION_S).decode())
        except TimeUp as error:
            until = self._clock.monotonic() + TOO_LONG_S
            return _Found(refused=f"{error} to translate it; make it smaller", until=until)
        except Refused as error:
            return _Found(refused=str(error))
        except CannotStart as error:
            raise Unavailable(f"constraints cannot be translated here now ({error})", retry_after_s=1.0) from error

    def _keep(self, form: str, text: str, found: _Found) -> None:
        before = self._known.pop((form, text), None)
        self._bytes -= 0 if before is None else _size(text, before)
        self._known[form, text] = found
        self._bytes += _size(text, found)
        while self._bytes > MOST_KNOWN_BYTES:
            (_, gone), value = self._known.popitem(last=False)
            self._bytes -= _size(gone, value)


def _size(text: str, found: _Found) -> int:
    return len(text) + len(found.text) + len(found.refused) + 512
