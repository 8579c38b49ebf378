"""What of a request confines the output to a language."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import deepseek_recipe as recipe

from headrace.engine.text.json_schema.markup import DSML
from headrace.engine.text.structural_tags import BESIDE_V41
from headrace.engine.text.tokenizer import Tokenizer
from headrace.services.gateway import hermes
from headrace.services.gateway.tool_grammars import Answer, Format, Held, Wanted, in_hermes, in_v41
from headrace.services.runtime.errors import InvalidArgument, Unimplemented
from headrace.v1 import common_pb2

_FIELD: Final = "constraint"
"""Which each API calls by a name of its own (errors.py)."""


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

    Raises Unimplemented, InvalidArgument naming the constraint.
    """
    made = _of_format(wanted, converted)
    if made is not None and place.reasons:
        made.after_token_ids.append(place.tokenizer.special_id(recipe.SpecialToken.ThinkingEnd.default_str()))
    return made


def answer_of(wanted: Mapping[str, Any], converted: recipe.ConversationRequest, place: Place) -> Answer | None:
    """The same where a call may stand instead: a language in which nothing reads like one; None: any text.

    Raises Unimplemented, InvalidArgument naming the constraint.
    """
    made = _of_format(wanted, converted)
    if made is None:
        return None
    language = made.WhichOneof("language")
    if language in ("json_object", "json_schema"):
        schema = json.loads(made.json_schema) if language == "json_schema" else {"type": "object"}
        part: Format = {"type": "json_schema", "json_schema": schema, "style": BESIDE_V41 if place.v41 else "json"}
    elif language == "regex":
        # V4.1's reader finds calls anywhere in a text, the other one at its beginning (hermes.CallReader).
        part = {"type": "regex", "pattern": made.regex, "never": DSML if place.v41 else f"^{hermes.TAG}"}
    else:
        message = "beside tools that may be called not as a grammar or a tag, whose text could read like a call"
        raise Unimplemented(_FIELD, f"{message}; give a schema or a regex, or set tool_choice to none")
    return Answer(part, _FIELD)


def held_calls(wanted: Wanted, place: Place) -> Held | None:
    """The language of an answer with tools; None: it is free, and `wanted.one` is not seen to.

    Calls that have to be are held, and all calls where a tool is strict, or where the text beside them is held. With
    V4.1's markup one call alone takes a language, too: no stop string has the special token by which a call ends.
    Raises InvalidArgument naming a tool.
    """
    strict = any(wanted.given[tool.name].strict for tool in wanted.tools)
    if not (wanted.forced or wanted.answer or strict or (wanted.one and place.v41)):
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
            raise InvalidArgument("json_schema.schema is needed", field=_FIELD)
        return common_pb2.Constraint(json_schema=_text(schema))
    if kind in ("regex", "grammar", "structural_tag"):
        value = wanted.get(kind, wanted.get("format") if kind == "structural_tag" else None)
        text = value if isinstance(value, str) else _text(value)
        if value is None or not text:
            raise InvalidArgument(f"{kind} is needed", field=_FIELD)
        confined = common_pb2.Constraint()
        setattr(confined, kind, text)
        return confined
    raise Unimplemented(_FIELD, f"type {str(kind)[:40]!r} is not supported")


def _text(document: object) -> str:
    return json.dumps(document, ensure_ascii=False)
