"""What of a request confines the output to a language."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import deepseek_recipe as recipe

from headrace.engine.text.tokenizer import Tokenizer
from headrace.services.gateway import hermes
from headrace.services.gateway.prompts import Rendered
from headrace.services.runtime.errors import InvalidArgument, Unimplemented
from headrace.v1 import common_pb2


def constraint_of(
    wanted: Mapping[str, Any],
    converted: recipe.ConversationRequest,
    conversation: recipe.Conversation,
    rendered: Rendered,
    tokenizer: Tokenizer,
    *,
    several: bool,
) -> common_pb2.Constraint | None:
    """`wanted` is a response_format. A forced call has a form of its own, and none beside it; `several`: more calls may
    follow it. The text is free while the model reasons.

    Raises Unimplemented, InvalidArgument naming response_format.
    """
    if rendered.in_call:
        if several:
            return common_pb2.Constraint(structural_tag=_text(hermes.calls_tag(conversation.tools)))
        return common_pb2.Constraint(json_schema=_text(hermes.call_schema(conversation.tools)))
    made = _of_format(wanted, converted)
    if made is not None and conversation.tools and conversation.tool_choice != "none":
        raise Unimplemented("response_format", "not beside tools; leave one of them out, or forbid calls")
    stage = converted.parsing_options.thinking_initial_stage
    if made is not None and stage is not None and stage.starts_in_reasoning():
        made.after_token_ids.append(tokenizer.special_id(recipe.SpecialToken.ThinkingEnd.default_str()))
    return made


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
