"""A client's constraint: checked and made what workers compile, or refused with the reason before it is accepted.

Schemas and structural tags are translated in a process of their own, which is killed when it takes too long; what came
of them is kept, refusals too. Expressions and grammars are judged by the workers, which refuse them at the reservation.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from headrace.engine.isolated import CannotStart, Isolated, Refused, TimeUp
from headrace.engine.text.constraint import MOST_AFTER
from headrace.engine.text.constraint_child import FORMS
from headrace.engine.text.constraint_forms import from_choices, from_grammar, from_regex, json_object
from headrace.engine.text.errors import TextError
from headrace.services.router.model import ServedModel
from headrace.services.router.prepare import Prepared, thinks
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
        """The same as `constrained`. Raises InvalidArgument, ResourceExhausted, Unavailable."""
        if not request.HasField("constraint"):
            return prepared
        form, after = _check(request, self._model, self._limits)
        asked = request.constraint
        text = await self._translated(form, getattr(asked, form)) if form in FORMS else _quick(form, asked)
        return replace(prepared, constraint=_made(form, text, after))

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


def constrained(
    prepared: Prepared, request: inference_pb2.GenerateRequest, model: ServedModel, limits: RequestSection
) -> Prepared:
    """With the constraint as workers take it: a grammar, an expression or an exact structural tag, and the tokens
    behind which it begins. Done here and now, for a user's own requests. Raises InvalidArgument."""
    if not request.HasField("constraint"):
        return prepared
    form, after = _check(request, model, limits)
    if form in FORMS:
        with _naming(form):
            return replace(prepared, constraint=_made(form, FORMS[form](getattr(request.constraint, form)).text, after))
    return replace(prepared, constraint=_made(form, _quick(form, request.constraint), after))


def _check(
    request: inference_pb2.GenerateRequest, model: ServedModel, limits: RequestSection
) -> tuple[str, tuple[int, ...]]:
    """The form of the language, and the tokens behind which it begins."""
    form = request.constraint.WhichOneof("language")
    if form is None:
        raise InvalidArgument("names no language", field="constraint")
    if model.text is None:
        raise InvalidArgument("this model has no tokenizer, which a constraint needs", field="constraint")
    if request.stop.ignore_eos:
        raise InvalidArgument("an output ends where its constraint does; leave it unset", field="stop.ignore_eos")
    return form, _after(request, model, limits)


def _after(request: inference_pb2.GenerateRequest, model: ServedModel, limits: RequestSection) -> tuple[int, ...]:
    asked, field = request.constraint, "constraint.after_token_ids"
    assert model.text is not None
    if len(asked.after_token_ids) > MOST_AFTER:
        raise InvalidArgument(f"at most {MOST_AFTER} tokens are taken", field=field)
    if any(token >= model.vocab_size for token in asked.after_token_ids):
        raise InvalidArgument(f"names a token outside the vocabulary of {model.vocab_size}", field=field)
    if not asked.after_reasoning:
        return tuple(asked.after_token_ids)
    field = "constraint.after_reasoning"
    if asked.after_token_ids:
        raise InvalidArgument("stands beside after_token_ids; give one of them", field=field)
    end = model.text.tokenizer.specials.get(END_OF_REASONING)
    if end is None:
        message = f"this model has no token {END_OF_REASONING}; say with after_token_ids how its reasoning ends"
        raise InvalidArgument(message, field=field)
    if request.prompt.WhichOneof("form") == "chat" and not thinks(request.prompt.chat, limits):
        return ()  # the prompt has ended the reasoning
    return (end,)


def _quick(form: str, asked: common_pb2.Constraint) -> str:
    """Forms that take no time."""
    with _naming(form):
        match form:
            case "json_object":
                if not asked.json_object:
                    raise InvalidArgument("must be true where it is given", field="constraint.json_object")
                return json_object().text
            case "choices":
                return from_choices(asked.choices.values).text
            case "grammar":
                return from_grammar(asked.grammar).text
            case _:
                return from_regex(asked.regex).text


@contextmanager
def _naming(form: str) -> Iterator[None]:
    try:
        yield
    except TextError as error:
        raise InvalidArgument(str(error), field=f"constraint.{form}") from error


def _made(form: str, text: str, after: tuple[int, ...]) -> common_pb2.Constraint:
    made = common_pb2.Constraint(after_token_ids=after)
    setattr(made, form if form in ("regex", "structural_tag") else "grammar", text)
    return made


def _size(text: str, found: _Found) -> int:
    return len(text) + len(found.text) + len(found.refused) + 512
