"""Which path is answered by what."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.services.gateway.app import Gateway
from headrace.services.gateway.door import request_id
from headrace.services.gateway.errors import Shape, error_response
from headrace.services.gateway.messages import Messages
from headrace.services.gateway.openapi import describe
from headrace.services.gateway.response_store import ResponseStore
from headrace.services.gateway.responses import Responses
from headrace.services.runtime.errors import InvalidArgument, NotFound


def make_app(gateway: Gateway, store: ResponseStore) -> Starlette:
    """The ASGI application."""
    messages, responses = Messages(gateway), Responses(gateway, store)
    route = gateway.route
    description = describe(gateway.upstreams.names)

    async def show(_request: Request) -> Response:
        return JSONResponse(description)

    one = "/v1/responses/{id}"
    return Starlette(
        routes=[
            route("/v1/chat/completions", gateway.chat, "openai", "chat"),
            route("/v1/completions", gateway.completions, "openai", "completions"),
            route("/v1/responses", responses.create, "openai", "responses"),
            route(one, responses.retrieve, "openai", "responses", ("GET",)),
            route(one, responses.delete, "openai", "responses", ("DELETE",)),
            route(f"{one}/input_items", responses.input_items, "openai", "responses", ("GET",)),
            route("/v1/messages", messages.create, "anthropic", "messages"),
            route("/v1/messages/count_tokens", messages.count_tokens, "anthropic", "messages"),
            route("/v1/models", gateway.models, "openai", methods=("GET",)),
            route("/v1/models/{model:path}", gateway.model, "openai", methods=("GET",)),
            Route("/openapi.json", show),
            Route("/health", gateway.health),
            Route("/ready", gateway.is_ready),
            Route("/metrics", gateway.show_metrics),
        ],
        exception_handlers={HTTPException: _no_route},
    )


async def _no_route(request: Request, error: Exception) -> Response:
    """What no route takes, in the shape of the API that was meant."""
    assert isinstance(error, HTTPException)
    shape: Shape = "anthropic" if request.url.path.startswith("/v1/messages") else "openai"
    if error.status_code == 405:
        response = error_response(InvalidArgument("this method is not taken here"), shape, request_id(request))
        response.status_code = 405
        response.headers.update(error.headers or {})
        return response
    return error_response(NotFound(f"nothing is at {request.url.path[:200]}"), shape, request_id(request))
