"""What is the same for all routes: the way of a request, errors in the API's shape, ids, counts (L11, L13)."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.services.gateway import chat, completions
from headrace.services.gateway.calls import Api, Call, make_call
from headrace.services.gateway.door import Door, Wanted, caller_of, credential, hear_caller, request_id
from headrace.services.gateway.errors import Shape, body_of, error_response, status_of
from headrace.services.gateway.rates import rate_headers
from headrace.services.gateway.settings import GatewaySettings
from headrace.services.gateway.sse import COMMENT, EventStream, Frames, begun, frame, until_left
from headrace.services.gateway.streams import answers, named
from headrace.services.gateway.upstream import Upstream, Upstreams
from headrace.services.runtime import logs
from headrace.services.runtime.errors import (
    Cancelled,
    HeadraceError,
    Internal,
    InvalidArgument,
)
from headrace.services.runtime.live import TURNED_AWAY, Outcome, outcome_of
from headrace.services.runtime.metrics import Metrics
from headrace.v1 import inference_pb2

CLOSED_STATUS: Final = 499
QUICK_BYTES: Final = 8192
"""Longest body that is read on the event loop; longer ones are another thread's."""
_log = logs.get(__name__)
Endpoint = Callable[[Request, str], Awaitable[Response]]


class Gateway:
    """Serves the models of `upstreams`. Belongs to the event loop's thread."""

    def __init__(self, settings: GatewaySettings, upstreams: Upstreams, metrics: Metrics) -> None:
        self.settings = settings
        self.upstreams = upstreams
        self.metrics = metrics
        self.door = Door(settings.gateway)
        self.started = False
        """Every router has answered once."""
        metrics.live_set("http_requests", "Requests served over HTTP", self.door.live)
        self._answers = metrics.counter("http_answers", "Answers, by route and status", ("route", "status"))
        self._seconds = metrics.histogram("http_seconds", "Duration of requests, streams included", ("route",))

    async def close(self) -> None:
        """Close the channels to the routers."""
        await self.upstreams.close()

    def route(
        self, path: str, endpoint: Endpoint, shape: Shape, api: str = "", methods: tuple[str, ...] = ("POST",)
    ) -> Route:
        """A route whose failures are told in `shape`."""
        return Route(path, _Guarded(self, path, endpoint, shape, api), methods=list(methods))

    # --- answers

    async def chat(self, request: Request, key: str) -> Response:
        """POST /v1/chat/completions."""
        body, call, wire = await self.call(chat.ChatApi(), request)
        include_usage = chat.wants_usage(body)
        if call.stream:
            frames = chat.frames(call, answers(call, wire), include_usage=include_usage)
            return await self.stream(request, frames, functools.partial(told_openai, key))
        return JSONResponse(await until_left(request.receive, chat.whole(call, answers(call, wire))))

    async def completions(self, request: Request, key: str) -> Response:
        """POST /v1/completions."""
        body = await self.door.body(request)
        upstream = self.upstreams.get(body.get("model"))
        await upstream.describe(credential(request))
        completion = completions.make_completion(body, upstream)
        include_usage = chat.wants_usage(body)
        wire = self.send(upstream, completion.request, request, self.door.wanted(request))
        if completion.stream:
            frames = completions.frames(completion, wire, include_usage=include_usage)
            return await self.stream(request, frames, functools.partial(told_openai, key))
        return JSONResponse(await until_left(request.receive, completions.whole(completion, wire)))

    async def call(
        self, api: Api, request: Request, body: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], Call, AsyncGenerator[inference_pb2.GenerateResponse, None]]:
        """The body, the call that it became, and the call's events, which nobody has asked for yet."""
        if body is None:
            body = await self.door.body(request)
        wanted = self.door.wanted(request)
        upstream = self.upstreams.get(body.get("model"))
        model = await upstream.describe(credential(request))
        making = functools.partial(make_call, api, body, upstream, model, self.settings.gateway.low_detail_tokens)
        size = int(request.headers.get("content-length") or QUICK_BYTES + 1)
        call = making() if size <= QUICK_BYTES else await asyncio.to_thread(making)
        return body, call, named(call, self.send(upstream, call.request, request, wanted))

    def send(
        self, upstream: Upstream, message: inference_pb2.GenerateRequest, request: Request, wanted: Wanted
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The events of a request, once they are asked for."""
        if message.traffic_class:  # of the body's own words, which headers overrule
            wanted = Wanted(wanted.traffic_class or message.traffic_class, wanted.priority, wanted.timeout_s)
        wanted.apply(message)
        return upstream.generate(
            message, credential(request), wanted.timeout_s, functools.partial(hear_caller, request)
        )

    async def stream(
        self, request: Request, frames: Frames, told: Callable[[HeadraceError], bytes], comment: bytes = COMMENT
    ) -> EventStream:
        """A stream that has begun. Raises what prevents it."""
        wait_s = self.settings.gateway.keepalive_seconds
        return EventStream(await begun(frames, request.receive, wait_s), frames, told, wait_s, comment)

    # --- models, state

    async def models(self, request: Request, _key: str) -> Response:
        """GET /v1/models. Raises Unauthenticated for a key that a router does not know; a router that cannot be
        reached leaves its model out."""
        key = credential(request)
        found = await asyncio.gather(*(one.ask(key) for one in self.upstreams.models), return_exceptions=True)
        data, failures = [], []
        for upstream, answer in zip(self.upstreams.models, found, strict=True):
            if isinstance(answer, inference_pb2.Model):
                data += [_model(name, answer) for name in (upstream.name, *upstream.entry.aliases)]
            elif isinstance(answer, HeadraceError):
                failures.append(answer)
            else:
                raise answer
        if failures and not data:
            raise failures[0]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return JSONResponse({"object": "list", "data": data, "has_more": False, "first_id": first, "last_id": last})

    async def model(self, request: Request, _key: str) -> Response:
        """GET /v1/models/{model}."""
        name = request.path_params["model"]
        return JSONResponse(_model(name, await self.upstreams.get(name).ask(credential(request))))

    async def health(self, _request: Request) -> Response:
        """This process answers."""
        return JSONResponse({"status": "ok"})

    async def is_ready(self, _request: Request) -> Response:
        """Every router has answered once, one answers now, and the process is not ending (L18)."""
        if self.door.closing or not self.started:
            return JSONResponse({"status": "ending" if self.door.closing else "starting"}, 503)
        if not await self.upstreams.one_answers():
            return JSONResponse({"status": "no router answers"}, 503)
        return JSONResponse({"status": "ready"})

    async def show_metrics(self, _request: Request) -> Response:
        """Prometheus."""
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")

    def count(self, path: str, status: int, seconds: float) -> None:
        """One answer."""
        self._answers.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)


class _Guarded:
    """An endpoint as ASGI: a class, so that Starlette leaves receive and send to it."""

    def __init__(self, gateway: Gateway, path: str, endpoint: Endpoint, shape: Shape, api: str) -> None:
        self._gateway, self._path, self._endpoint, self._shape, self._api = gateway, path, endpoint, shape, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        key, started = request_id(request), time.monotonic()
        with logs.request_context(key):
            response: Response
            failure: BaseException | None = None
            streamed = False
            try:
                with self._gateway.door.within() as ending:
                    try:
                        response = await self._endpoint(request, key)
                        self._name(response, request, key)
                        await response(scope, receive, send)
                        streamed = isinstance(response, EventStream)
                        failure = response.failure if isinstance(response, EventStream) else None
                    except BaseException as error:
                        failure = error
                        raise
                    finally:
                        ending.outcome = _outcome(failure, streamed=streamed)
                status = response.status_code if failure is None else _status(failure)
            except asyncio.CancelledError:
                raise
            except Cancelled:
                status = CLOSED_STATUS
            except Exception as error:  # noqa: BLE001 - the boundary of a request (L13)
                typed = _typed(error)
                status = status_of(typed)
                response = error_response(typed, self._shape, key, self._api)
                self._name(response, request, key)
                await response(scope, receive, send)
        self._gateway.count(self._path, status, time.monotonic() - started)

    def _name(self, response: Response, request: Request, key: str) -> None:
        """Headers of every answer: the request's name, and what is left of the caller's rates."""
        response.headers["x-request-id"] = response.headers["request-id"] = key
        response.headers.update(rate_headers(self._shape, caller_of(request), time.time()))


def _typed(error: Exception) -> HeadraceError:
    if isinstance(error, HeadraceError):
        if isinstance(error, Internal):
            _log.error("request failed", error=str(error))
        return error
    if isinstance(error, RecursionError):  # of whatever reads a document part by part, here or in a library
        return InvalidArgument("the body is nested too deeply; make it flatter")
    _log.error("request failed", exc_info=error)
    return Internal(f"an internal error; report request {logs.request_id()} to the operator")


def _status(failure: BaseException) -> int:
    return status_of(failure) if isinstance(failure, HeadraceError) else 500


def _outcome(failure: BaseException | None, *, streamed: bool) -> Outcome:
    """`streamed`: events had been sent when it failed."""
    if failure is None:
        return Outcome.FINISHED
    outcome = outcome_of(failure)
    return Outcome.FAILED if streamed and outcome in TURNED_AWAY else outcome


def told_openai(key: str, error: HeadraceError) -> bytes:
    """An error in the middle of a stream."""
    return frame(body_of(error, "openai", key, "chat"))


def _model(name: str, model: inference_pb2.Model) -> dict[str, Any]:
    """In the words of both OpenAI and Anthropic."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "display_name": name,
        "owned_by": "headrace",
        "context_length": model.limits.context_tokens,
        "max_output_tokens": model.limits.max_tokens,
        "family": model.family,
        "images": model.limits.max_images > 0,
    }
