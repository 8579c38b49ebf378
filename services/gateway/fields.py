"""Which fields of each API's requests are known, in which form, and what becomes of them.

A field that is not listed is refused by name; so is a value that its schema does not allow. One that changes nothing
here says so. docs/gateway.md and /openapi.json are rendered from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jsonschema

from headrace.services.runtime.errors import InvalidArgument, Unimplemented

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Field:
    """One top-level field."""

    schema: Schema
    note: str
    supported: bool = True
    """False: refused unless it has a value of `schema`, which asks for nothing."""


def _null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _number(low: float, high: float) -> dict[str, Any]:
    return _null({"type": "number", "minimum": low, "maximum": high})


def _integer(low: int, high: int) -> dict[str, Any]:
    return _null({"type": "integer", "minimum": low, "maximum": high})


TEXT: Final = {"type": "string"}
BOOLEAN: Final = _null({"type": "boolean"})
OBJECT: Final = _null({"type": "object"})
ARRAY: Final = _null({"type": "array"})
_METADATA: Final = _null({"type": "object", "maxProperties": 16, "additionalProperties": {"type": "string"}})
_TOKENS: Final = _integer(1, 2**31 - 1)
_TIER: Final = Field({"enum": ["auto", "default", "standard_only", None]}, "there is one tier")
_NOTHING: Final = {"type": "null"}
_MODEL: Final = Field({**TEXT, "minLength": 1}, "a name of `/v1/models`")
_STREAM: Final = Field(BOOLEAN, "server-sent events")
_USER: Final = Field(_null(TEXT), "no effect; who calls is told by the key")
_CACHE_KEY: Final = Field(_null(TEXT), "no effect; equal prefixes are found whatever the key")
_TEMPERATURE: Final = Field(_number(0, 2), "v4.1 while reasoning: 1, as DeepSeek's conversion decides")
_TOP_P: Final = Field(_number(0, 1), "v4.1: as DeepSeek's conversion decides (1)")
_TOP_K: Final = Field(_integer(0, 2**31 - 1), "0: off")
_MIN_P: Final = Field(_number(0, 1), "extension")
_PENALTY: Final = Field(_number(-2, 2), "over the generated tokens")
_REPETITION: Final = Field(_null({"type": "number", "exclusiveMinimum": 0}), "extension; 1: off")
_SEED: Final = Field(_integer(0, 2**63 - 1), "with `system_fingerprint`; see Repeatable results")
_BIAS: Final = Field(
    _null({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
    "by token id",
)
_STOP: Final = Field(
    _null({"anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 16}]}), "ends reasoning, too; up to 16"
)
_N: Final = Field(_integer(1, 128), "as many as the router allows")
_TOOLS: Final = Field(ARRAY, "functions; calls of `strict` ones and forced calls are held to the schema, see Tools")
_CHOICE: Final = Field(
    _null({"anyOf": [TEXT, {"type": "object"}]}),
    "`auto`, `none`, `required` (one call or more), or one function (one call); "
    "forced calls are direct unless the request asks for reasoning",
)
_PARALLEL: Final = Field(BOOLEAN, "`false`: at most one call")
_PLAIN: Final = {"enum": [None, False]}
_VERBOSITY: Final = {"enum": [None, "medium"]}

CHAT: Final[Mapping[str, Field]] = {
    "model": _MODEL,
    "messages": Field({"type": "array", "minItems": 1, "items": {"type": "object"}}, "text and images"),
    "stream": _STREAM,
    "stream_options": Field(OBJECT, "`include_usage`"),
    "max_tokens": Field(_TOKENS, "of each choice, reasoning included"),
    "max_completion_tokens": Field(_TOKENS, "the same"),
    "temperature": _TEMPERATURE,
    "top_p": _TOP_P,
    "top_k": _TOP_K,
    "min_p": _MIN_P,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _REPETITION,
    "logit_bias": _BIAS,
    "seed": _SEED,
    "n": _N,
    "stop": _STOP,
    "logprobs": Field(BOOLEAN, "of the text; calls have none"),
    "top_logprobs": Field(_integer(0, 20), "with `logprobs`"),
    "response_format": Field(
        OBJECT, "`text`, `json_object`, `json_schema`; extensions `regex`, `grammar` (EBNF), `structural_tag`"
    ),
    "tools": _TOOLS,
    "tool_choice": _CHOICE,
    "parallel_tool_calls": _PARALLEL,
    "thinking": Field(OBJECT, "DeepSeek's switch, v4.1"),
    "reasoning_effort": Field(_null(TEXT), "v4.1; `none` everywhere"),
    "prompt_cache_key": _CACHE_KEY,
    "prompt_cache_retention": Field(_null(TEXT), "no effect; see docs/retention.md"),
    "user": _USER,
    "user_id": _USER,
    "safety_identifier": _USER,
    "metadata": Field(_METADATA, "no effect"),
    "store": Field(BOOLEAN, "no effect: chats are not stored"),
    "service_tier": _TIER,
    "verbosity": Field(_VERBOSITY, "`medium` only"),
    "modalities": Field({"enum": [None, ["text"]]}, "text only"),
    "audio": Field(_NOTHING, "no audio", supported=False),
    "prediction": Field(_NOTHING, "no predicted outputs", supported=False),
    "web_search_options": Field(_NOTHING, "no search", supported=False),
    "functions": Field(_NOTHING, "give tools", supported=False),
    "function_call": Field(_NOTHING, "give tool_choice", supported=False),
    "prompt_cache_options": Field(OBJECT, "no effect"),
    "moderation": Field(_NOTHING, "no moderation", supported=False),
}
COMPLETIONS: Final[Mapping[str, Field]] = {
    "model": _MODEL,
    "prompt": Field({"anyOf": [TEXT, {"type": "array", "minItems": 1}]}, "one text, or one array of token ids"),
    **{name: CHAT[name] for name in ("stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "min_p",
       "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "n", "stop", "user")},
    "logprobs": Field(_integer(0, 20), "top ones beside the chosen"),
    "echo": Field(_PLAIN, "not echoed", supported=False),
    "best_of": Field({"enum": [None, 1]}, "use n", supported=False),
    "suffix": Field(_NOTHING, "no filling in", supported=False),
}  # fmt: skip
RESPONSES: Final[Mapping[str, Field]] = {
    "model": _MODEL,
    "input": Field({"anyOf": [TEXT, {"type": "array"}]}, "messages, images, function calls and their outputs"),
    "instructions": Field(_null(TEXT), "of this response alone"),
    "previous_response_id": Field(_null(TEXT), "a stored one of the same tenant"),
    "store": Field(BOOLEAN, "default true; bounded, see Stored responses"),
    "stream": _STREAM,
    "stream_options": Field(OBJECT, "`include_obfuscation` has no effect: nothing is padded"),
    "max_output_tokens": Field(_TOKENS, "reasoning included"),
    "temperature": _TEMPERATURE,
    "top_p": _TOP_P,
    "top_k": _TOP_K,
    "min_p": _MIN_P,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _REPETITION,
    "logit_bias": _BIAS,
    "seed": Field(_SEED.schema, "extension"),
    "stop": Field(_STOP.schema, "extension"),
    "top_logprobs": Field(_integer(0, 20), "with `include: [message.output_text.logprobs]`"),
    "include": Field(
        _null({"type": "array", "items": {"enum": ["message.output_text.logprobs", "reasoning.encrypted_content"]}}),
        "the logprobs of the text",
    ),
    "text": Field(
        _null({"type": "object", "properties": {"format": {}, "verbosity": _VERBOSITY}, "additionalProperties": False}),
        "`format`: text, json_object, json_schema; extensions regex, grammar, structural_tag; `verbosity`: medium",
    ),
    "reasoning": Field(OBJECT, "`effort`: v4.1; `none` everywhere"),
    "tools": _TOOLS,
    "tool_choice": _CHOICE,
    "parallel_tool_calls": _PARALLEL,
    "max_tool_calls": Field(_NOTHING, "no built-in tools", supported=False),
    "prompt_cache_key": _CACHE_KEY,
    "prompt_cache_retention": CHAT["prompt_cache_retention"],
    "prompt_cache_options": Field(OBJECT, "no effect"),
    "user": _USER,
    "safety_identifier": _USER,
    "metadata": Field(_METADATA, "given back"),
    "service_tier": _TIER,
    "truncation": Field({"enum": [None, "disabled"]}, "`disabled` only"),
    "background_options": Field(_NOTHING, "no background work", supported=False),
    "image": Field(_NOTHING, "no images are made", supported=False),
    "access_programs": Field(_NOTHING, "no such programs", supported=False),
    "background": Field(_PLAIN, "no background work", supported=False),
    "conversation": Field(_NOTHING, "use previous_response_id", supported=False),
    "prompt": Field(_NOTHING, "no stored prompts", supported=False),
    "context_management": Field(_NOTHING, "no compaction", supported=False),
    "moderation": Field(_NOTHING, "no moderation", supported=False),
}
MESSAGES: Final[Mapping[str, Field]] = {
    "model": _MODEL,
    "messages": Field({"type": "array", "minItems": 1, "items": {"type": "object"}}, "text, images, tool results"),
    "max_tokens": Field({"type": "integer", "minimum": 1}, "lowered to the model's most"),
    "system": Field(_null({"anyOf": [TEXT, {"type": "array"}]}), "text"),
    "stream": _STREAM,
    "temperature": Field(_number(0, 1), _TEMPERATURE.note),
    "top_p": _TOP_P,
    "top_k": _TOP_K,
    "seed": Field(_SEED.schema, "extension"),
    "stop_sequences": Field(_null({"type": "array", "items": TEXT, "maxItems": 16}), _STOP.note),
    "tools": _TOOLS,
    "tool_choice": Field(
        OBJECT, "`auto`, `any` (one call or more), `tool` (one call), `none`; `disable_parallel_tool_use`"
    ),
    "thinking": Field(OBJECT, "v4.1; `disabled` everywhere; a budget is not enforced"),
    "output_config": Field(OBJECT, "`format`: json_schema; `effort`: v4.1"),
    "output_format": Field(OBJECT, "json_schema"),
    "metadata": Field(OBJECT, "no effect"),
    "service_tier": _TIER,
    "cache_control": Field(OBJECT, "also on blocks, up to 4: traffic class AGENT; v4.1: a snapshot; `ttl`: no effect"),
    "speed": Field({"enum": [None, "standard"]}, "there is one speed"),
    "thread": Field(_NOTHING, "no threads; the client's tool runner goes on without", supported=False),
    "user_profile_id": Field(_NOTHING, "no profiles", supported=False),
    "workspace_id": Field(_NOTHING, "no workspaces", supported=False),
    "diagnostics": Field(_NOTHING, "no diagnostics", supported=False),
    "inference_geo": Field(_NOTHING, "one place", supported=False),
    "container": Field(_NOTHING, "no containers", supported=False),
    "mcp_servers": Field({"enum": [None, []]}, "no MCP", supported=False),
    "context_management": Field(_NOTHING, "no compaction", supported=False),
}
COUNT: Final[Mapping[str, Field]] = {
    name: MESSAGES[name]
    for name in ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format",
                 "cache_control", "mcp_servers", "context_management", "speed", "user_profile_id", "workspace_id")
}  # fmt: skip
REQUIRED: Final = {
    "chat": ("model", "messages"),
    "completions": ("model", "prompt"),
    "responses": ("model",),
    "messages": ("model", "messages", "max_tokens"),
    "count": ("model", "messages"),
}
TABLES: Final[Mapping[str, Mapping[str, Field]]] = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "count": COUNT,
}
_CHECKS: Final = {
    api: {name: jsonschema.Draft202012Validator(dict(field.schema)) for name, field in table.items()}
    for api, table in TABLES.items()
}


def check(api: str, body: Mapping[str, Any]) -> None:
    """Raises InvalidArgument or Unimplemented naming the first field that is wrong."""
    table, checks = TABLES[api], _CHECKS[api]
    for name in REQUIRED[api]:
        if body.get(name) is None:
            raise InvalidArgument("is needed", field=name)
    for name, value in body.items():
        field = table.get(name)
        if field is None:
            raise InvalidArgument("is no field of this API here; leave it out", field=name)
        if not checks[name].is_valid(value):
            if not field.supported:
                raise Unimplemented(name, f"is not supported ({field.note}); leave it out")
            raise InvalidArgument(_said(checks[name], value), field=name)


def _said(validator: Any, value: object) -> str:
    """The innermost complaint, without the value, which may be long."""
    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    text = f"must satisfy {error.validator} {error.validator_value!r}"[:200]
    return f"{where.removeprefix('.')} {text}".strip()
