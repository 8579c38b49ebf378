"""/v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Final

import deepseek_recipe as recipe

from headrace.services.gateway import usage as usages
from headrace.services.gateway.calls import ApiName, Body, Call
from headrace.services.gateway.served import Served
from headrace.services.gateway.sse import DONE, Frames, frame
from headrace.services.gateway.streams import Answers, gather
from headrace.services.gateway.tool_grammars import ClientTool
from headrace.services.runtime.errors import InvalidArgument, Unimplemented
from headrace.v1 import common_pb2

_READ: Final = (
    "messages", "stream", "max_tokens", "temperature", "top_p", "seed", "stop", "logprobs", "top_logprobs",
    "response_format", "tools", "tool_choice", "thinking", "reasoning_effort",
)  # fmt: skip
"""Fields that deepseek-recipe reads."""


class ChatApi:
    """See calls.Api."""

    name: ApiName = "chat"
    id_prefix = "chatcmpl-"
    request_class: Any = recipe.ChatCompletionRequest
    reasoning_field = "reasoning_effort"

    def recipe_body(self, body: Body, served: Served) -> dict[str, Any]:
        read = {name: body[name] for name in _READ if name in body}
        if "max_completion_tokens" in body:
            if "max_tokens" in body:
                raise InvalidArgument("is the same as max_completion_tokens; give one", field="max_tokens")
            read["max_tokens"] = body["max_completion_tokens"]
        only_functions(body.get("tools", ()), ("function",))
        if "tools" in read:
            read["tools"] = [
                {**tool, "function": loose(tool.get("function"), f"tools[{index}].function")}
                for index, tool in enumerate(body["tools"])
            ]
        read["messages"] = [_message(message, index) for index, message in enumerate(body["messages"])]
        kind = self.response_format(body).get("type", "text")
        v41 = served.protocol == "v4.1"
        if kind in ("grammar", "structural_tag") or (kind == "json_object" and not v41):
            del read["response_format"]
        if not v41 and read.get("reasoning_effort") == "none":
            del read["reasoning_effort"]
        return read

    def response_format(self, body: Body) -> Mapping[str, Any]:
        found = body.get("response_format")
        return found if isinstance(found, Mapping) else {}

    def forces_any_tool(self, body: Body) -> bool:
        return False

    def one_call_only(self, body: Body) -> bool:
        return body.get("parallel_tool_calls") is False

    def asks_reasoning(self, body: Body) -> bool:
        switch = body.get("thinking", {}).get("type")
        return bool(switch == "enabled" or (switch is None and body.get("reasoning_effort", "none") != "none"))

    def client_tools(self, body: Body, names: Mapping[str, tuple[str, str]]) -> dict[str, ClientTool]:
        functions = [tool["function"] for tool in body.get("tools", ())]
        return {
            one["name"]: ClientTool(f"tools[{index}].function.parameters", bool(one.get("strict")))
            for index, one in enumerate(functions)
        }


def only_functions(tools: Iterable[Any], kinds: Container[str]) -> None:
    """Raises Unimplemented for a tool that somebody else than the client would have to run."""
    for index, tool in enumerate(tools):
        kind = tool.get("type", "custom") if isinstance(tool, Mapping) else ""
        if kind not in kinds:
            raise Unimplemented(f"tools[{index}].type", f"{str(kind)[:40]!r} is not supported; tools are functions")


def loose(tool: Any, field: str) -> Any:
    """A tool without `strict`, which is enforced here: deepseek-recipe would take fewer schemas, and change them.
    Raises InvalidArgument."""
    if not isinstance(tool, Mapping):
        return tool
    if not isinstance(tool.get("strict"), bool | None):
        raise InvalidArgument("must be true or false", field=f"{field}.strict")
    return {name: value for name, value in tool.items() if name != "strict"}


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """The developer is the system; an empty content of null is left out where calls stand beside it."""
    role = message.get("role")
    if role == "function":
        raise Unimplemented(f"messages[{index}].role", "give a tool message")
    if message.get("audio") is not None:
        raise Unimplemented(f"messages[{index}].audio", "no audio is taken; leave it out")
    kept = {name: value for name, value in message.items() if value is not None}
    return {**kept, "role": "system"} if role == "developer" else kept


def wants_usage(body: Body) -> bool:
    """Whether the stream ends with a chunk of usage. Raises InvalidArgument, Unimplemented."""
    options = body.get("stream_options") or {}
    for name, value in options.items():
        if not isinstance(value, bool | None):
            raise InvalidArgument("must be true or false", field=f"stream_options.{name}")
        if name not in ("include_usage", "include_obfuscation"):
            raise Unimplemented(f"stream_options.{name}", "is not supported; leave it out")
    if options and not body.get("stream"):
        raise InvalidArgument("needs stream", field="stream_options")
    return bool(options.get("include_usage"))


async def frames(call: Call, answers: Answers, *, include_usage: bool) -> Frames:
    """The stream of chunks, as OpenAI's clients read it: usage comes last and only if asked for."""
    reasoning = 0
    async with aclosing(answers):
        async for item in answers:
            if isinstance(item, common_pb2.Usage):
                if include_usage:
                    yield frame(_usage_chunk(call, item, reasoning))
                continue
            index, events = item
            out = b""
            for event in events:
                text = event.to_json()
                if index or '"finish_reason":null' not in text:
                    chunk = json.loads(text)
                    reasoning += _reasoning(chunk.get("usage"))
                    chunk["usage"] = None
                    for choice in chunk["choices"]:
                        choice["index"] = index
                    out += frame(chunk)
                else:
                    out += frame(text)
            yield out
    yield DONE


def _usage_chunk(call: Call, usage: common_pb2.Usage, reasoning: int) -> dict[str, Any]:
    return {
        "id": call.id,
        "object": "chat.completion.chunk",
        "created": call.created,
        "model": call.model,
        "system_fingerprint": call.served.fingerprint() or None,
        "choices": [],
        "usage": usages.of_chat(usage, reasoning),
    }


def _reasoning(usage: Mapping[str, Any] | None) -> int:
    details = (usage or {}).get("completion_tokens_details") or {}
    return int(details.get("reasoning_tokens", 0))


async def whole(call: Call, answers: Answers) -> dict[str, Any]:
    """The completion when it is there."""
    gathered = [recipe.ChatCompletionResponse(call.id, call.model, call.created, 0, 0) for _ in range(call.n)]
    usage = await gather(answers, gathered)
    documents = [json.loads(one.to_json()) for one in gathered]
    answer: dict[str, Any] = documents[0]
    reasoning = sum(_reasoning(document.get("usage")) for document in documents)
    choices = [choice for document in documents for choice in document["choices"]]
    for index, choice in enumerate(choices):
        choice["index"] = index
        choice["message"].setdefault("refusal", None)
        for one in choice["message"].get("tool_calls") or ():
            one.pop("index", None)
    return {**answer, "choices": choices, "usage": usages.of_chat(usage, reasoning)}
