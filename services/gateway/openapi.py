"""The gateway's OpenAPI description, of the same tables that requests are checked by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from headrace.services.gateway.fields import REQUIRED, TABLES

_POSTS: Final = {
    "/v1/chat/completions": ("chat", "A chat completion"),
    "/v1/completions": ("completions", "A text completion"),
    "/v1/responses": ("responses", "A response"),
    "/v1/messages": ("messages", "A message"),
    "/v1/messages/count_tokens": ("count", "The tokens of a message"),
}
_GETS: Final = {
    "/v1/models": "The served models",
    "/v1/models/{model}": "One model",
    "/v1/responses/{id}": "A stored response",
    "/v1/responses/{id}/input_items": "What a stored response answered",
    "/health": "Whether the process answers",
    "/ready": "Whether it takes requests",
}
_ERROR: Final = {"description": "An error in the API's own shape", "content": {"application/json": {"schema": {}}}}


def describe(models: Sequence[str]) -> dict[str, Any]:
    """OpenAPI 3.1 of a gateway that serves `models`."""
    paths: dict[str, Any] = {}
    for path, (api, text) in _POSTS.items():
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if api != "count":
            content["text/event-stream"] = {"schema": {"type": "string"}}
        paths[path] = {
            "post": {
                "summary": text,
                "operationId": api,
                "requestBody": {"required": True, "content": {"application/json": {"schema": _schema(api, models)}}},
                "responses": _responses(content),
            }
        }
    for path, text in _GETS.items():
        content = {"application/json": {"schema": {"type": "object"}}}
        paths[path] = {"get": {"summary": text, "parameters": _parameters(path), "responses": _responses(content)}}
    one = "/v1/responses/{id}"
    paths[one]["delete"] = {**paths[one]["get"], "summary": "Forget a stored response"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace gateway", "version": "1"},
        "paths": paths,
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"bearer": []}],
    }


def _schema(api: str, models: Sequence[str]) -> dict[str, Any]:
    properties = {
        name: {**field.schema, "description": field.note} for name, field in TABLES[api].items() if field.supported
    }
    properties["model"] = {"enum": list(models), "description": properties["model"]["description"]}
    return {
        "type": "object",
        "properties": properties,
        "required": list(REQUIRED[api]),
        "additionalProperties": False,
    }


def _parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in ("id", "model")
        if f"{{{name}}}" in path
    ]


def _responses(content: dict[str, Any]) -> dict[str, Any]:
    return {"200": {"description": "The answer", "content": content}, "default": _ERROR}
