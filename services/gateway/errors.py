"""Typed errors in each API's own shape (L12): status, body, headers."""

from __future__ import annotations

import json
import math
from typing import Any, Final, Literal

import deepseek_recipe
from starlette.responses import Response

from headrace.services.runtime.errors import (
    HeadraceError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    http_status,
)

Shape = Literal["openai", "anthropic"]
_OPENAI: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_ANTHROPIC: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_FIELDS: Final = {
    "sampling.logprobs": "top_logprobs",
    "stop.stop": "stop",
    "constraint": "response_format",
    "priority": "x-headrace-priority",
    "timeout_ms": "x-headrace-timeout-ms",
}
"""Of the wire's fields, those that HTTP clients call otherwise."""
_OF_MESSAGES: Final = {"stop.stop": "stop_sequences", "constraint": "output_config.format"}
_OF_COMPLETIONS: Final = dict.fromkeys(
    ("prompt.text.text", "prompt.text", "prompt.tokens.token_ids", "prompt.tokens"), "prompt"
)
"""The longer ones first."""
_OF_RESPONSES: Final = {"stop.max_tokens": "max_output_tokens", "constraint": "text.format"}


_NO_THREAD: Final = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Upon which Anthropic's client sends whole conversations: its tool runner asks for a thread first, unless it is told
not to."""


class TooLarge(InvalidArgument):
    """The body is longer than this gateway reads."""


class TooSlow(InvalidArgument):
    """The body takes longer than this gateway waits; the connection ends with the answer."""


def status_of(error: HeadraceError) -> int:
    """A field that is not supported is the request's fault (400), whoever found it."""
    if isinstance(error, TooLarge):
        return 413
    if isinstance(error, TooSlow):
        return 408
    if isinstance(error, Unimplemented):
        return 400
    return http_status(error)


def client_field(field: str, api: str) -> str:
    """The wire's path of a field as the API names it."""
    own = {"completions": _OF_COMPLETIONS, "messages": _OF_MESSAGES, "responses": _OF_RESPONSES}.get(api, {})
    for wire, name in (own | {k: v for k, v in _FIELDS.items() if k not in own}).items():
        if field == wire or field.startswith((f"{wire}[", f"{wire}.")):
            return name + field[len(wire) :]
    for prefix in ("sampling.", "stop.", "prompt.tokens."):
        field = field.removeprefix(prefix)
    return field


def _code(error: HeadraceError, status: int) -> str | None:
    if isinstance(error, Unauthenticated):
        return "invalid_api_key"
    if isinstance(error, NotFound):
        return "model_not_found" if error.field == "model" else "not_found"
    if isinstance(error, ResourceExhausted):
        return "rate_limit_exceeded"
    if isinstance(error, Unimplemented):
        return "unsupported_parameter"
    if isinstance(error, PermissionDenied):
        return "permission_denied"
    return None if status < 500 else type(error).__name__.lower()


def body_of(error: HeadraceError, shape: Shape, request_id: str, api: str = "") -> dict[str, Any]:
    """The document that clients of the API expect."""
    status = status_of(error)
    field = client_field(error.field, api)
    message = f"{field}: {error.message}" if field else error.message
    if shape == "anthropic":
        told: dict[str, Any] = {"type": _ANTHROPIC.get(status, "api_error"), "message": message}
        if isinstance(error, Unimplemented) and error.field == "thread":
            told["details"] = _NO_THREAD
        return {"type": "error", "error": told, "request_id": request_id}
    kind = _OPENAI.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": field or None, "code": _code(error, status)}}


def headers_of(error: HeadraceError) -> dict[str, str]:
    """When to come back, in seconds and, as OpenAI's clients prefer it, in milliseconds."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(round(error.retry_after_s * 1000))
    if isinstance(error, TooSlow):
        headers["connection"] = "close"
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    # What a client can do nothing about by repeating.
    if not isinstance(error, ResourceExhausted | Unavailable) and status_of(error) >= 500:
        headers["x-should-retry"] = "false"
    return headers


def error_response(error: HeadraceError, shape: Shape, request_id: str, api: str = "") -> Response:
    """The answer to a request that failed before its answer began."""
    content = json.dumps(body_of(error, shape, request_id, api), ensure_ascii=False).encode()
    return Response(content, status_of(error), headers_of(error), media_type="application/json")


def from_recipe(error: Exception, field: str) -> HeadraceError:
    """What deepseek-recipe says of a request, whose `field` is to blame. Its bodies are in the shape of the API that it
    read."""
    message = str(error)
    if isinstance(error, deepseek_recipe.ConversionError):
        try:
            message = str(json.loads(error.body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = error.body
    return InvalidArgument(message.removeprefix("invalid request body: "), field=field)
