"""/v1/responses: create, retrieve, delete, and what `previous_response_id` goes on from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Final

import deepseek_recipe as recipe
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.services.gateway import usage as usages
from headrace.services.gateway.app import Gateway
from headrace.services.gateway.calls import ApiName, Body, Call
from headrace.services.gateway.chat import loose, only_functions
from headrace.services.gateway.door import caller_of, credential
from headrace.services.gateway.errors import body_of
from headrace.services.gateway.response_store import ResponseStore, Stored, encode, owner_of
from headrace.services.gateway.served import Served
from headrace.services.gateway.sse import DONE, Frames, frame, until_left
from headrace.services.gateway.streams import Answers, answers, gather
from headrace.services.gateway.tool_grammars import ClientTool
from headrace.services.runtime import logs
from headrace.services.runtime.errors import HeadraceError, Internal, NotFound, Unavailable, Unimplemented
from headrace.v1 import common_pb2

_READ: Final = (
    "input", "instructions", "max_output_tokens", "stream", "temperature", "top_p", "tools", "tool_choice", "text",
    "reasoning", "include", "top_logprobs", "user",
)  # fmt: skip
_ITEMS: Final = frozenset({"message", "function_call", "function_call_output", "reasoning"})
_LAST: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_ECHOED: Final = (
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
_EXTENSIONS: Final = ("regex", "grammar", "structural_tag")
"""Formats that deepseek-recipe does not know."""
_TOOL: Final = {"description": None, "parameters": None, "strict": None}
"""Members that a function has in a response."""
_log = logs.get(__name__)


class ResponsesApi:
    """See calls.Api."""

    name: ApiName = "responses"
    id_prefix = "resp_"
    request_class: Any = recipe.ResponsesRequest
    reasoning_field = "reasoning"

    def recipe_body(self, body: Body, served: Served) -> dict[str, Any]:
        read = {name: body[name] for name in _READ if name in body}
        for index, item in enumerate(body["input"] if isinstance(body.get("input"), list) else ()):
            kind = item.get("type", "message") if isinstance(item, Mapping) else ""
            if not isinstance(kind, str) or kind not in _ITEMS:
                raise Unimplemented(f"input[{index}].type", f"{str(kind)[:40]!r} is not supported")
        only_functions(body.get("tools", ()), ("function", "namespace"))
        if "tools" in read:
            read["tools"] = [_loose(tool, f"tools[{index}]") for index, tool in enumerate(body["tools"])]
        if served.protocol != "v4.1":
            if body.get("reasoning", {}).get("effort") in (None, "none"):
                read.pop("reasoning", None)
            if self.response_format(body).get("type") == "json_object":
                del read["text"]
        if self.response_format(body).get("type") in _EXTENSIONS:
            del read["text"]
        return read

    def response_format(self, body: Body) -> Mapping[str, Any]:
        found = body.get("text", {}).get("format") or {}
        if not isinstance(found, Mapping):
            return {"type": str(found)}
        return {**found, "json_schema": found} if found.get("type") == "json_schema" else found

    def forces_any_tool(self, body: Body) -> bool:
        return False

    def one_call_only(self, body: Body) -> bool:
        return body.get("parallel_tool_calls") is False

    def asks_reasoning(self, body: Body) -> bool:
        return body.get("reasoning", {}).get("effort") not in (None, "none")

    def client_tools(self, body: Body, names: Mapping[str, tuple[str, str]]) -> dict[str, ClientTool]:
        found = {}
        of_space = {place: name for name, place in names.items()}
        for index, tool in enumerate(body.get("tools", ())):
            if tool.get("type") != "namespace":
                found[tool["name"]] = ClientTool(f"tools[{index}].parameters", bool(tool.get("strict")))
                continue
            for at, one in enumerate(tool.get("tools", ())):
                name = of_space[tool["name"], one["name"]]
                found[name] = ClientTool(f"tools[{index}].tools[{at}].parameters", bool(one.get("strict")))
        return found


def _loose(tool: Any, field: str) -> Any:
    """chat.loose, in namespaces too."""
    tool = loose(tool, field)
    if not isinstance(tool, Mapping) or not isinstance(tool.get("tools"), list):
        return tool
    return {**tool, "tools": [loose(one, f"{field}.tools[{at}]") for at, one in enumerate(tool["tools"])]}


class Responses:
    """The endpoints."""

    def __init__(self, gateway: Gateway, store: ResponseStore) -> None:
        self._gateway = gateway
        self._store = store

    async def create(self, request: Request, _key: str) -> Response:
        """POST /v1/responses."""
        body = await self._gateway.door.body(request)
        full = await self._continued(body, request)
        _, call, wire = await self._gateway.call(ResponsesApi(), request, full)
        answer = _Answer(self, body, full, request, call)
        items = answers(call, wire)
        if call.stream:
            return await self._gateway.stream(request, answer.frames(items), answer.told)
        return JSONResponse(await until_left(request.receive, answer.whole(items)))

    async def retrieve(self, request: Request, _key: str) -> Response:
        """GET /v1/responses/{id}."""
        return JSONResponse((await self._named(request)).response)

    async def delete(self, request: Request, _key: str) -> Response:
        """DELETE /v1/responses/{id}."""
        identifier = request.path_params["id"]
        found = await self._own(request, identifier, "response_id")
        await self._store.delete(found.owner, identifier)
        return JSONResponse({"id": identifier, "object": "response", "deleted": True})

    async def input_items(self, request: Request, _key: str) -> Response:
        """GET /v1/responses/{id}/input_items, all on one page."""
        found = await self._named(request)
        items = [{"id": f"item_{index}", "type": "message", **item} for index, item in enumerate(found.items)]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": "", "last_id": ""}
        return JSONResponse({"object": "list", "data": items, "has_more": False, **ends})

    async def _named(self, request: Request) -> Stored:
        return await self._own(request, request.path_params["id"], "response_id")

    async def _own(self, request: Request, identifier: str, field: str) -> Stored:
        """A response of the caller's tenant, who he is being asked of the router now. Raises NotFound for any other,
        and Unauthenticated for a key that is good no more (L25)."""
        found = await self._store.get(identifier)
        if found is not None:
            tenant = await self._gateway.upstreams.get(found.model).tenant(credential(request))
            if owner_of(found.model, tenant) == found.owner:
                return found
        raise NotFound(f"no response {identifier[:100]!r} is stored here for your key", field=field)

    async def _continued(self, body: dict[str, Any], request: Request) -> dict[str, Any]:
        """The body with everything that came before it as input. Raises as `_own`."""
        previous = body.get("previous_response_id")
        if not isinstance(previous, str):
            return body
        found = await self._own(request, previous, "previous_response_id")
        return {**body, "input": [*found.items, *found.response["output"], *_items(body.get("input"))]}

    async def keep(self, stored: Stored) -> bool:
        """Whether it was stored. An answer is never lost to its store."""
        data = encode(stored)
        section = self._gateway.settings.responses
        if len(data) > section.max_bytes or section.per_tenant == 0:
            return False
        try:
            await self._store.put(stored.owner, stored.response["id"], data)
        except Unavailable as error:
            _log.warning("a response could not be stored", error=str(error))
            return False
        return True


def _items(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return given if isinstance(given, list) else []


class _Answer:
    """One response on its way."""

    def __init__(
        self, responses: Responses, body: dict[str, Any], full: dict[str, Any], request: Request, call: Call
    ) -> None:
        """`full` is the body with what came before it as input."""
        self._responses = responses
        self._request = request
        self._body = body
        self._items = _items(full.get("input"))
        self._call = call
        self._wanted = body.get("store") is not False
        self._sequence = 0
        self._last: dict[str, Any] = {"id": call.id, "object": "response", "created_at": call.created, "output": []}

    async def frames(self, items: Answers) -> Frames:
        """The stream of events. The last one waits for the usage, which it tells."""
        final: tuple[str, dict[str, Any]] | None = None
        async with aclosing(items):
            async for item in items:
                if isinstance(item, common_pb2.Usage):
                    if final is None:
                        raise Internal("the answer came without its end; repeat the request")
                    name, document = final
                    document["response"] = await self._completed(document["response"], item)
                    yield frame(document, name) + DONE
                    return
                out = b""
                for event in item[1]:
                    text = event.to_json()
                    name = recipe.ResponsesResponse.sse_event_name(event) or ""
                    self._sequence += 1
                    if name.count(".") > 1:  # of a part of the response
                        out += frame(text, name)
                        continue
                    document = json.loads(text)
                    if "response" in document:
                        self._last = document["response"] = self._own(document["response"])
                    if name in _LAST:
                        final = (name, document)
                    else:
                        out += frame(document, name)
                if out:
                    yield out

    async def whole(self, items: Answers) -> dict[str, Any]:
        """The response when it is there."""
        call = self._call
        gathered = recipe.ResponsesResponse(call.id, call.model, call.created, 0, 0)
        usage = await gather(items, [gathered])
        return await self._completed(self._own(json.loads(gathered.to_json())), usage)

    def told(self, error: HeadraceError) -> bytes:
        """An error in the middle of the stream: the response has failed."""
        told = body_of(error, "openai", "", "responses")["error"]
        response = {**self._last, "status": "failed", "error": {"code": "server_error", "message": told["message"]}}
        document = {"type": "response.failed", "response": response, "sequence_number": self._sequence}
        return frame(document, "response.failed") + DONE

    def _own(self, response: dict[str, Any]) -> dict[str, Any]:
        """With what deepseek-recipe does not know."""
        response |= {name: self._body[name] for name in _ECHOED if self._body.get(name) is not None}
        response["previous_response_id"] = self._body.get("previous_response_id")
        response["store"] = self._wanted
        response["text"]["verbosity"] = response["text"].get("verbosity") or "medium"  # it has no null
        form = (self._body.get("text") or {}).get("format") or {}
        if form.get("type") in ("json_object", *_EXTENSIONS):
            response["text"]["format"] = form
        if self._body.get("parallel_tool_calls") is False:
            response["parallel_tool_calls"] = False
        # deepseek-recipe has read them without `strict`, and a forced call behind reasoning as one that may be.
        if self._body.get("tools"):
            response["tools"] = [
                {**_TOOL, **tool} if tool.get("type") == "function" else tool for tool in self._body["tools"]
            ]
        if self._body.get("tool_choice") is not None:
            response["tool_choice"] = self._body["tool_choice"]
        return response

    async def _completed(self, response: dict[str, Any], usage: common_pb2.Usage) -> dict[str, Any]:
        details = (response.get("usage") or {}).get("output_tokens_details") or {}
        response["usage"] = usages.of_responses(usage, int(details.get("reasoning_tokens", 0)))
        if self._wanted:
            caller = caller_of(self._request)
            if caller is None:
                _log.warning("a response is not stored: its router, of another version, does not say who calls")
                response["store"] = False
            else:
                owner = owner_of(self._call.model, caller.tenant)
                stored = Stored(owner, self._call.model, response, self._items)
                response["store"] = await self._responses.keep(stored)
        return response
