"""A request's constraint, compiled before the engine gets the request."""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.masks.grammars import Grammars
from headrace.engine.request import EngineRequest
from headrace.services.runtime.errors import InvalidArgument
from headrace.services.worker.waits import waiting_for


async def with_grammar(request: EngineRequest, grammars: Grammars) -> EngineRequest:
    """The request as the engine takes it. Raises InvalidArgument with the reason for a language that is refused,
    EngineError. Cancelling the wait does not stop the compilation: others may wait for it."""
    if request.constraint is None:
        return request
    try:
        grammar = await waiting_for(grammars.ask(request.constraint))
    except EngineError as error:
        if error.code is not ErrorCode.INVALID_ARGUMENT:
            raise
        raise InvalidArgument(error.message.removeprefix("constraint: "), field="constraint") from error
    return replace(request, grammar=grammar)
