"""Bodies of Chat Completions and Completions as the router's request, and replies as their response bodies.

Fields, sampling, usage and errors are the gateway's (services/gateway); what differs is the prompt: a chat goes to the
router as messages, which it renders by the model's template, since a client has no tokenizer. What of a chat cannot go
that way is refused by name.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from headrace.cli.askers import Reply
from headrace.services.gateway import completions, fields
from headrace.services.gateway import usage as usages
from headrace.services.gateway.calls import sampling_of, stops_of
from headrace.services.runtime.errors import InvalidArgument, Unimplemented
from headrace.v1 import common_pb2, inference_pb2

Body = Mapping[str, Any]
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
_APIS: Final = {CHAT: "chat", COMPLETIONS: "completions"}
_GATEWAYS_ONLY: Final = (
    "stream", "stream_options", "logprobs", "top_logprobs", "tools", "tool_choice", "thinking", "reasoning_effort",
)  # fmt: skip
"""Fields that need a stream, the model's tokens, or an answer taken apart; refused where they ask for something."""
_ROLES: Final = {
    "system": inference_pb2.CHAT_ROLE_SYSTEM,
    "developer": inference_pb2.CHAT_ROLE_SYSTEM,
    "user": inference_pb2.CHAT_ROLE_USER,
    "assistant": inference_pb2.CHAT_ROLE_ASSISTANT,
}
_DATA_URL: Final = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)


def to_request(url: str, body: Any) -> inference_pb2.GenerateRequest:
    """The request of one line. Raises InvalidArgument, Unimplemented whose `field` is the body's."""
    if url not in _APIS:
        raise Unimplemented("url", f"{url!r} is not served here; {CHAT} and {COMPLETIONS} are")
    if not isinstance(body, dict):
        raise InvalidArgument("must be a JSON object", field="body")
    given = {name: value for name, value in body.items() if value is not None}
    fields.check(_APIS[url], {"model": "any", **given})
    for name in _GATEWAYS_ONLY:
        if given.get(name):
            raise Unimplemented(name, "is not supported in a file of requests; leave it out, or ask a gateway")
    request = inference_pb2.GenerateRequest(
        model=given.get("model", ""), sampling=sampling_of(given), traffic_class=common_pb2.TRAFFIC_CLASS_BATCH
    )
    request.stop.stop.extend(stops_of(given))
    if (limit := _max_tokens(url, given)) is not None:
        request.stop.max_tokens = limit
    if url == CHAT:
        request.prompt.chat.CopyFrom(_chat(given["messages"]))
        if "response_format" in given:
            _constrain(request, given["response_format"])
    else:
        _complete(request.prompt, given["prompt"])
    return request


def field_of(path: str, body: Body) -> str:
    """The body's name of a request field that was refused."""
    for pattern, name in (
        (r"prompt\.chat\.messages", "messages"),
        (r"prompt\.chat", "messages"),
        (r"prompt\.(text|tokens)(\.text|\.token_ids)?", "prompt"),
        (r"sampling\.", ""),
        (r"constraint(\.json_schema|\.json_object)?", "response_format"),
        (r"stop\.max_tokens", "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"),
        (r"stop\.stop", "stop"),
    ):
        if (found := re.match(pattern, path)) is not None:
            return name + path[found.end() :]
    return path


def response_body(url: str, reply: Reply, created: int) -> dict[str, Any]:
    """The body of a good response; `created` in seconds since 1970."""
    chat = url == CHAT
    choices = []
    for index, choice in enumerate(reply.choices):
        content = {"message": {"role": "assistant", "content": choice.text}} if chat else {"text": choice.text}
        choices.append({"index": index, **content, "logprobs": None, "finish_reason": choice.reason})
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{reply.request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": reply.model.name,
        "system_fingerprint": f"fp_{reply.model.fingerprint[:16]}",
        "choices": choices,
        "usage": usages.of_chat(reply.usage, 0),
    }


def _max_tokens(url: str, given: Body) -> int | None:
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    if len(names) == 2 and given[names[0]] != given[names[1]]:
        raise InvalidArgument("contradicts max_completion_tokens; give one of them", field="max_tokens")
    if names:
        return int(given[names[0]])
    return completions.MAX_TOKENS if url == COMPLETIONS else None


def _chat(messages: Any) -> inference_pb2.ChatPrompt:
    return inference_pb2.ChatPrompt(messages=[_message(one, f"messages[{at}]") for at, one in enumerate(messages)])


def _message(message: Any, field: str) -> inference_pb2.ChatMessage:
    if not isinstance(message, dict):
        raise InvalidArgument("must be an object", field=field)
    given = {name: value for name, value in message.items() if value is not None}
    for name in sorted(given.keys() - {"role", "content"}):
        raise Unimplemented(f"{field}.{name}", "is not supported in a file of requests; leave it out")
    if given.get("role") not in _ROLES:
        raise InvalidArgument(f"must be one of {', '.join(_ROLES)}", field=f"{field}.role")
    content = given.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidArgument("must be a text or a list of parts", field=f"{field}.content")
    wire = [_part(part, f"{field}.content[{at}]") for at, part in enumerate(parts)]
    return inference_pb2.ChatMessage(role=_ROLES[given["role"]], content=wire)


def _part(part: Any, field: str) -> inference_pb2.ContentPart:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return inference_pb2.ContentPart(text=part["text"])
    if kind == "image_url":
        link = part.get("image_url")
        address = link.get("url") if isinstance(link, dict) else None
        if not isinstance(address, str):
            raise InvalidArgument("must hold a url", field=f"{field}.image_url")
        return inference_pb2.ContentPart(image=image_of(address, f"{field}.image_url"))
    raise Unimplemented(field, "must be a text part or an image_url part; others are not supported")


def image_of(address: str, field: str) -> inference_pb2.Image:
    """A picture given as a data URL, or by its address, which the router judges. Raises InvalidArgument."""
    if not address.startswith("data:"):
        return inference_pb2.Image(url=address)
    head = _DATA_URL.match(address)
    try:
        if head is None:
            raise ValueError("it does not begin with data:image/…;base64,")
        return inference_pb2.Image(data=base64.b64decode(address[head.end() :], validate=True))
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"no picture: {error}", field=field) from None


def _constrain(request: inference_pb2.GenerateRequest, wanted: Any) -> None:
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_object":
        request.constraint.json_object = True
    elif kind == "json_schema":
        named = wanted.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if not isinstance(schema, dict | bool):
            raise InvalidArgument("must hold a schema", field="response_format.json_schema")
        request.constraint.json_schema = json.dumps(schema)
    elif kind != "text":
        raise InvalidArgument("must be text, json_object or json_schema", field="response_format.type")


def _complete(prompt: inference_pb2.Prompt, given: Any) -> None:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        prompt.text.text = given
    elif isinstance(given, list) and given and not any(isinstance(one, str | list) for one in given):
        if not all(type(token) is int and 0 <= token < 2**32 for token in given):
            raise InvalidArgument("holds something that is no token id", field="prompt")
        prompt.tokens.token_ids.extend(given)
    else:
        raise InvalidArgument(
            "must be one text or one list of token ids; several prompts are several lines", field="prompt"
        )
