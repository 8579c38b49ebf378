"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Final

import deepseek_recipe as recipe
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.services.gateway import fields
from headrace.services.gateway import usage as usages
from headrace.services.gateway.app import Gateway
from headrace.services.gateway.calls import ApiName, Body
from headrace.services.gateway.chat import loose, only_functions
from headrace.services.gateway.door import credential
from headrace.services.gateway.errors import body_of
from headrace.services.gateway.served import Served
from headrace.services.gateway.sse import Frames, frame, until_left
from headrace.services.gateway.streams import Answers, answers, gather
from headrace.services.gateway.tool_grammars import ClientTool
from headrace.services.runtime.errors import HeadraceError, Unimplemented
from headrace.v1 import common_pb2

_READ: Final = (
    "messages", "system", "max_tokens", "stream", "temperature", "top_p", "stop_sequences", "tools", "tool_choice",
    "thinking",
)  # fmt: skip
_PING: Final = frame({"type": "ping"}, "ping")


class MessagesApi:
    """See calls.Api."""

    name: ApiName = "messages"
    id_prefix = "msg_"
    request_class: Any = recipe.MessagesRequest
    reasoning_field = "thinking"

    def recipe_body(self, body: Body, served: Served) -> dict[str, Any]:
        read = {name: body[name] for name in _READ if name in body}
        config = body.get("output_config", {})
        for name in config:
            if name not in ("format", "effort"):
                raise Unimplemented(f"output_config.{name}", "is not supported; leave it out")
        if config.get("effort") is not None:
            if served.protocol != "v4.1":
                raise Unimplemented("output_config.effort", "this model does not reason; leave it out")
            read["output_config"] = {"effort": config["effort"]}
        only_functions(body.get("tools", ()), ("custom",))
        if "tools" in read:
            read["tools"] = [loose(tool, f"tools[{index}]") for index, tool in enumerate(body["tools"])]
        return read

    def response_format(self, body: Body) -> Mapping[str, Any]:
        found = body.get("output_config", {}).get("format")
        if found is None:
            found = body.get("output_format", {})
        if not isinstance(found, Mapping):
            return {"type": str(found)}
        return {"type": found.get("type", ""), "json_schema": found} if found else {}

    def forces_any_tool(self, body: Body) -> bool:
        return bool(body.get("tool_choice", {}).get("type") == "any")

    def one_call_only(self, body: Body) -> bool:
        return bool(body.get("tool_choice", {}).get("disable_parallel_tool_use"))

    def asks_reasoning(self, body: Body) -> bool:
        return False  # which this API refuses, too

    def client_tools(self, body: Body, names: Mapping[str, tuple[str, str]]) -> dict[str, ClientTool]:
        return {
            tool["name"]: ClientTool(f"tools[{index}].input_schema", bool(tool.get("strict")))
            for index, tool in enumerate(body.get("tools", ()))
        }


class Messages:
    """The endpoints."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request, key: str) -> Response:
        """POST /v1/messages."""
        _, call, wire = await self._gateway.call(MessagesApi(), request)
        items = answers(call, wire)
        if call.stream:
            return await self._gateway.stream(request, frames(items), functools.partial(_told, key), _PING)
        empty = recipe.MessagesResponse(call.id, call.model, call.created, 0, 0)
        return JSONResponse(await until_left(request.receive, whole(empty, items)))

    async def count_tokens(self, request: Request, _key: str) -> Response:
        """POST /v1/messages/count_tokens: as the request would be read."""
        body = await self._gateway.door.body(request)
        fields.check("count", body)
        _, call, _ = await self._gateway.call(MessagesApi(), request, {**body, "max_tokens": 1})
        upstream = self._gateway.upstreams.get(body.get("model"))
        tokens = await upstream.count(call.request.prompt, credential(request))
        return JSONResponse({"input_tokens": tokens})


async def frames(items: Answers) -> Frames:
    """The stream of events. The last two wait for the usage, which the first of them tells."""
    held: list[Any] = []
    async with aclosing(items):
        async for item in items:
            if isinstance(item, common_pb2.Usage):
                for event in held:
                    name, document = _event(event)
                    if name == "message_delta":
                        document["usage"] = usages.of_messages(item)
                    yield frame(document, name)
                return
            out = b""
            for event in item[1]:
                name = recipe.MessagesResponse.sse_event_name(event) or ""
                if held or name == "message_delta":
                    held.append(event)
                else:
                    out += frame(event.to_json(), name)
            if out:
                yield out


def _event(event: Any) -> tuple[str, dict[str, Any]]:
    return recipe.MessagesResponse.sse_event_name(event) or "", json.loads(event.to_json())


async def whole(empty: recipe.MessagesResponse, items: Answers) -> dict[str, Any]:
    """The message when it is there."""
    usage = await gather(items, [empty])
    message: dict[str, Any] = json.loads(empty.to_json())
    return {**message, "usage": usages.of_messages(usage)}


def _told(key: str, error: HeadraceError) -> bytes:
    return frame(body_of(error, "anthropic", key, "messages"), "error")
