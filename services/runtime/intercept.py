"""What happens around every call that a server of this system serves, in one place.

The request id is bound to the logs; the call enters a live set and leaves it exactly once with an outcome (L11); typed
errors become statuses; anything else that a handler raises is a defect, is logged, and ends this call alone (L13).
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from prometheus_client import Histogram

from headrace.services.runtime import errors, logs, peers
from headrace.services.runtime.ids import new_request_id, valid_request_id
from headrace.services.runtime.live import LiveSet, Outcome, outcome_of
from headrace.services.runtime.metrics import Metrics

REQUEST_ID_KEY: Final = "x-request-id"
"""Metadata key of the request id, on every hop."""

Translate = Callable[[Exception], errors.HeadraceError | None]
_Context = grpc.aio.ServicerContext[Any, Any]
_log = logs.get(__name__)


def request_metadata() -> grpc.aio.Metadata:
    """Metadata that hands the current request's id on to the next service. (Of a tuple gRPC would first find out, at a
    cost, that it is none of its own.)"""
    identifier = logs.request_id()
    return grpc.aio.Metadata() if identifier is None else grpc.aio.Metadata((REQUEST_ID_KEY, identifier))


class CallerLeft(errors.Cancelled):
    """A response could not be written: gRPC's core gave the call up, which its asyncio side learns a moment later."""


class CallGuard(grpc.aio.ServerInterceptor):
    """The interceptor. `translate` turns exceptions of a lower layer (the engine's) into typed errors."""

    def __init__(
        self, metrics: Metrics, translate: Translate | None = None, door: peers.Doorkeeper | None = None
    ) -> None:
        """`door` lets calls in by their certificate; None: there are none."""
        self._door = door
        self.admitting: set[str] = set()
        """Methods (/package.Service/Method) that bring new work."""
        self.draining = False
        self._translate = translate
        self._calls: dict[str, LiveSet[object]] = {}
        self._handlers: dict[str, tuple[Any, grpc.RpcMethodHandler[Any, Any]]] = {}
        metrics.live_sets("rpc", "Calls served", ("method",), lambda: {(m,): s for m, s in tuple(self._calls.items())})
        self._seconds = metrics.histogram("rpc_seconds", "Duration of calls served", ("method",))
        self._messages: Counter[str] = Counter()
        """Messages that were of the method's type and went to its handler, by method."""
        metrics.counts(
            "rpc_messages",
            "Messages that a handler was given",
            ("method",),
            lambda: {(method,): number for method, number in tuple(self._messages.items())},
        )
        self._timed: dict[str, Histogram] = {}
        """Of each method, since labels are looked up slowly."""

    @property
    def live_calls(self) -> int:
        """Calls in flight over all methods."""
        return sum(len(calls) for calls in self._calls.values())

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's handler; None (unknown method) stays None."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        known = self._handlers.get(method)
        if known is None or known[0] is not handler:
            known = self._handlers[method] = (handler, self._wrap(method, handler))
        return known[1]

    def _wrap(self, method: str, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        streams = inspect.isasyncgenfunction(behaviour)
        if not streams and not inspect.iscoroutinefunction(behaviour):
            raise TypeError(f"{method}: a handler must be async")

        def taken() -> None:
            self._messages[method] += 1

        read = _reader(handler.request_deserializer, taken, streaming=bool(handler.request_streaming))

        async def respond(request: Any, context: _Context) -> Any:
            async with self._around(method, context):
                return await behaviour(read(request), context)

        async def stream(request: Any, context: _Context) -> None:
            # Written out rather than yielded on, so that the handler's generator is closed here and now, in this task,
            # when the client leaves: its finally blocks release what the request holds (L10).
            async with self._around(method, context), aclosing(behaviour(read(request), context)) as responses:
                async for response in responses:
                    try:
                        await context.write(response)
                    except grpc.aio.InternalError as error:
                        raise CallerLeft("the caller left") from error

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[bool(handler.request_streaming), bool(handler.response_streaming)]
        return make(
            stream if streams else respond,
            request_deserializer=None,
            response_serializer=handler.response_serializer,
        )

    @asynccontextmanager
    async def _around(self, method: str, context: _Context) -> AsyncIterator[None]:
        calls = self._calls.setdefault(method, LiveSet(method))
        started = time.monotonic()
        with logs.request_context(_request_id(context)), calls.within(object()) as ending:
            try:
                if self._door is not None:
                    peers.enter(self._door.admit(method, context.auth_context()))
                if self.draining and method in self.admitting:
                    raise errors.Unavailable("this replica is draining; send the request to another one")
                yield
            except asyncio.CancelledError as error:
                if not errors.task_is_cancelled():
                    # gRPC sends no status for it, and the client would wait for ever.
                    ending.outcome = Outcome.FAILED
                    _log.error("a call was cancelled from inside", method=method, exc_info=error)
                    await errors.abort(context, errors.Unavailable("a peer left during the call; try again"))
                ending.outcome = _left(context)
                raise
            except CallerLeft as error:
                ending.outcome = _left(context)
                _log.debug("the caller left", method=method, exc_info=error)
            except grpc.aio.AbortError:
                ending.outcome = Outcome.FAILED
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of a call: one bad request never kills a worker
                if context.cancelled() or context.done():
                    # The caller left, and writing to it failed: nobody is there to be told.
                    ending.outcome = Outcome.CANCELLED
                    return
                typed = self._typed(method, error)
                ending.outcome = outcome_of(typed)
                await errors.abort(context, typed)
            finally:
                seconds = self._timed.get(method)
                if seconds is None:
                    seconds = self._timed[method] = self._seconds.labels(method)
                seconds.observe(time.monotonic() - started)

    def _typed(self, method: str, error: Exception) -> errors.HeadraceError:
        if isinstance(error, errors.HeadraceError):
            typed = error
        else:
            translated = None if self._translate is None else self._translate(error)
            typed = translated or errors.Internal(
                f"an internal error ended the call; report request {logs.request_id()} to the operator"
            )
        if isinstance(typed, errors.Internal):
            _log.error("call failed", method=method, exc_info=error)
        else:
            _log.debug("call refused", method=method, error=str(typed), status=errors.grpc_status(typed).name)
        return typed


def _reader(
    deserialize: Callable[[bytes], Any] | None, taken: Callable[[], None], *, streaming: bool
) -> Callable[[Any], Any]:
    """Bytes to messages inside the call, where bytes that are no message get a typed answer; gRPC's own is UNKNOWN.
    `taken` is told of every one that is a message."""

    def one(data: bytes) -> Any:
        try:
            message = data if deserialize is None else deserialize(data)
        except DecodeError as error:
            raise errors.InvalidArgument(f"the request is not the message this call takes: {error}") from error
        taken()
        return message

    async def many(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        try:
            async for data in requests:
                yield one(data)
        except grpc.aio.BaseError as error:
            # The server has stopped, as it does when the process changes its role.
            raise errors.Unavailable("this process is stopping; try again elsewhere") from error

    return many if streaming else one


def _left(context: _Context) -> Outcome:
    remaining = context.time_remaining()
    return Outcome.DEADLINE if remaining is not None and remaining <= 0 else Outcome.CANCELLED


def _request_id(context: _Context) -> str:
    """The caller's id if it may be logged, else a new one."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and valid_request_id(value):
            return value
    return new_request_id()
