"""A request's constraint, compiled before the engine gets the request."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.masks.grammars import Grammar, Grammars
from headrace.engine.request import EngineRequest
from headrace.services.runtime.errors import InvalidArgument


async def with_grammar(request: EngineRequest, grammars: Grammars) -> EngineRequest:
    """The request as the engine takes it. Raises InvalidArgument with the reason for a language that is refused,
    EngineError. Cancelling the wait does not stop the compilation: others may wait for it."""
    if request.constraint is None:
        return request
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[Grammar] = loop.create_future()

    def answered(done: Future[Grammar]) -> None:
        loop.call_soon_threadsafe(_hand_on, done, waiting)

    try:
        grammars.ask(request.constraint).add_done_callback(answered)
        return replace(request, grammar=await waiting)
    except EngineError as error:
        if error.code is not ErrorCode.INVALID_ARGUMENT:
            raise
        raise InvalidArgument(error.message.removeprefix("constraint: "), field="constraint") from error


def _hand_on(done: Future[Grammar], waiting: asyncio.Future[Grammar]) -> None:
    if waiting.done():
        return
    error = done.exception()
    if error is None:
        waiting.set_result(done.result())
    else:
        waiting.set_exception(error)
