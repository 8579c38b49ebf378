"""What of a request confines the output to a language."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from headrace.engine.text.tokenizer import Tokenizer
from headrace.services.gateway.tool_grammars import Held, Wanted, in_hermes, in_v41
from headrace.services.runtime.errors import InvalidArgument, Unimplemented
from headrace.v1 import common_pb2


@dataclass(frozen=True)
class Place:
    """Where the model goes on."""

    v41: bool
    tokenizer: Tokenizer
    opened: bool
    """Inside a call that the prompt has opened."""
    reasons: bool
    """In its reasoning."""


def constraint_of(
    wanted: Mapping[str, Any], converted: recipe.ConversationRequest, place: Place
) -> common_pb2.Constraint | None:
    """`wanted` is a response_format. The text is free while the model reasons.

    Raises Unimplemented, InvalidArgument naming response_format.
    """
    made = _of_format(wanted, converted)
    if made is not None and place.reasons:
        made.after_token_ids.append(place.tokenizer.special_id(recipe.SpecialToken.ThinkingEnd.default_str()))
    return made


def held_calls(wanted: Wanted, place: Place) -> Held | None:
    """The language of an answer with tools; None: it is free, and `wanted.one` is not seen to.

    Calls that have to be are held, and all calls where a tool is strict. With V4.1's markup one call alone takes a
    language, too: no stop string has the special token by which a call ends. Raises InvalidArgument naming a tool.
    """
    strict = any(wanted.given[tool.name].strict for tool in wanted.tools)
    if not (wanted.forced or strict or (wanted.one and place.v41)):
        return None
    if place.v41:
        return in_v41(wanted, place.tokenizer, reasoning=place.reasons, opened=place.opened)
    return in_hermes(wanted)


def _of_format(wanted: Mapping[str, Any], converted: recipe.ConversationRequest) -> common_pb2.Constraint | None:
    kind = wanted.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return common_pb2.Constraint(json_object=True)
    if kind == "json_schema":
        # deepseek-recipe's is the schema as `strict` demands it.
        constraint = converted.inference_options.output_constraint
        if constraint is not None and constraint.kind == "json" and constraint.schema:
            return common_pb2.Constraint(json_schema=constraint.schema)
        document = wanted.get("json_schema")
        schema = document.get("schema") if isinstance(document, Mapping) else None
        if not isinstance(schema, Mapping | bool):
            raise InvalidArgument("json_schema.schema is needed", field="response_format")
        return common_pb2.Constraint(json_schema=_text(schema))
    if kind in ("regex", "grammar", "structural_tag"):
        value = wanted.get(kind, wanted.get("format") if kind == "structural_tag" else None)
        text = value if isinstance(value, str) else _text(value)
        if value is None or not text:
            raise InvalidArgument(f"{kind} is needed", field="response_format")
        confined = common_pb2.Constraint()
        setattr(confined, kind, text)
        return confined
    raise Unimplemented("response_format", f"type {str(kind)[:40]!r} is not supported")


def _text(document: object) -> str:
    return json.dumps(document, ensure_ascii=False)
