"""Tools as languages: what a model may write where its calls are held to their schemas.

Both protocols are structural tags (engine/text/structural_tags.py), in which each tool's schema is a part of its own,
so that a refusal names the tool. Inside a call everything is held: the name, the arguments, what stands around them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import deepseek_recipe as recipe

from headrace.engine.text.json_schema.ebnf import quoted, text_without
from headrace.engine.text.tokenizer import Tokenizer
from headrace.services.gateway import hermes
from headrace.services.runtime.errors import HeadraceError, InvalidArgument
from headrace.v1 import common_pb2

_DSML: Final = recipe.SpecialToken.Dsml.default_str()
_THINK_END: Final = recipe.SpecialToken.ThinkingEnd.default_str()
_FREE: Final = r"\ud800-\udfff"
"""No characters, though a class takes their bytes for some."""
_REFUSED: Final = re.compile(r"(format[\w.\[\]]*): (.*)", re.DOTALL)
Format = dict[str, Any]


@dataclass(frozen=True)
class ClientTool:
    """A tool as the client gave it."""

    field: str
    """Of its schema: `tools[0].function.parameters`."""
    strict: bool = False


@dataclass(frozen=True)
class Held:
    """A language of calls."""

    constraint: common_pb2.Constraint
    fields: Mapping[str, str]
    """The client's field by the path of its part in the tag."""

    def named(self, error: HeadraceError) -> HeadraceError:
        """A refusal of the constraint in the client's words: it is the tools that were refused, or the answer."""
        if not isinstance(error, InvalidArgument) or not f"{error.field}.".startswith("constraint."):
            return error
        found = _REFUSED.fullmatch(error.message)
        field = self.fields.get(found[1]) if found else None
        if found is None or field is None:
            return InvalidArgument(error.message, field="tools")
        return InvalidArgument(f"cannot be enforced: {found[2]}", field=field)


@dataclass(frozen=True)
class Answer:
    """What a text has to be."""

    part: Format
    """Of a tag. No text of its language reads like a call."""
    field: str
    """Of the request."""


@dataclass(frozen=True)
class Wanted:
    """What calls there may be."""

    tools: Sequence[recipe.ToolDefinition]
    given: Mapping[str, ClientTool]
    """By the tools' names."""
    forced: bool
    """There has to be a call, and its schema holds whether it is strict or not."""
    one: bool
    """At most one call."""
    answer: Answer | None = None
    """The text of an answer without calls, which then has either this or calls; None: text is free. Not where a call is
    forced."""

    def schema(self, tool: recipe.ToolDefinition) -> dict[str, Any]:
        """Of the arguments. Raises InvalidArgument for a name of a parameter that no call can tell."""
        own = self.given[tool.name]
        parameters = tool.parameters if self.forced or own.strict else None
        if not isinstance(parameters, dict):
            parameters = {"type": "object"} if parameters in (None, True) else {"not": {}}
        properties = parameters.get("properties")
        for name in properties if isinstance(properties, dict) else ():
            if not hermes.NAME.fullmatch(name):
                message = f"cannot be enforced: a call cannot tell {name[:40]!r}; names have no blank, quote, < or ｜"
                raise InvalidArgument(message, field=own.field)
        also = parameters.get("allOf")
        rule = {"type": "object", "propertyNames": {"pattern": f"^{hermes.NAME.pattern}$"}}
        return {**parameters, "allOf": [*(also if isinstance(also, list) else []), rule]}


def in_hermes(wanted: Wanted) -> Held:
    """Free text with calls in the Hermes form; if one is forced, the call that the prompt has opened, and others. Where
    the text is not free: calls, or the text."""
    owners: list[tuple[Format, str]] = []
    calls = []
    for tool in wanted.tools:
        part: Format = {"type": "json_schema", "json_schema": wanted.schema(tool)}
        owners.append((part, wanted.given[tool.name].field))
        head = f'root ::= "{{\\"name\\":" " "? {quoted(json.dumps(tool.name))} "," " "? "\\"arguments\\":" " "?'
        calls.append(_sequence({"type": "grammar", "grammar": head}, part, _text("}")))
    call: Format = {"type": "or", "elements": calls}
    if wanted.forced:
        close = _text(f"\n{hermes.CLOSE}")
        further = {"type": "star", "content": _sequence(_text(f"\n{hermes.OPEN}"), call, close)}
        return _held(call if wanted.one else _sequence(call, close, further), owners)
    space: Format = {"type": "grammar", "grammar": "root ::= [\\n ]?"}
    if wanted.answer is not None:
        whole = _sequence(_text(hermes.TAG), space, call, space, _text(hermes.CLOSE))
        several: Format = {"type": "plus", "content": _sequence(whole, space)}
        return _either(whole if wanted.one else several, wanted.answer, (), owners)
    tag = {"type": "tag", "begin": hermes.TAG, "content": _sequence(space, call, space), "end": hermes.CLOSE}
    return _held(
        {"type": "triggered_tags", "triggers": [hermes.TAG], "tags": [tag], "stop_after_first": wanted.one}, owners
    )


def in_v41(wanted: Wanted, tokenizer: Tokenizer, *, reasoning: bool, opened: bool) -> Held:
    """Free text with at most one block of calls, which ends it, in DeepSeek's markup. `reasoning`: behind reasoning, in
    which no call is opened; its reader would take that for one. `opened`: the prompt has opened the block."""
    dsml: Format = {"type": "token", "token": tokenizer.special_id(_DSML)}
    owners: list[tuple[Format, str]] = []
    calls = []
    for tool in wanted.tools:
        schema = wanted.schema(tool)
        part: Format = {"type": "json_schema", "json_schema": schema, "style": "deepseek_v4_1_xml"}
        part["dsml_token"] = dsml["token"]
        owners.append((part, wanted.given[tool.name].field))
        head = f' invoke name="{tool.name}">\n'
        calls.append(_sequence(_text("<"), dsml, _text(head), part, _text("</"), dsml, _text(" invoke>\n")))
    call: Format = {"type": "or", "elements": calls}
    block = [call if wanted.one else {"type": "plus", "content": call}, _text("</"), dsml, _text(" calls>")]
    if not opened:
        block = [_text("<"), dsml, _text(" calls>\n"), *block]
    before = [_free(), {"type": "token", "token": tokenizer.special_id(_THINK_END)}] if reasoning else []
    if wanted.answer is not None:
        return _either(_sequence(_optional(_text("\n\n")), *block), wanted.answer, before, owners)
    if not wanted.forced:
        block = [_free(), _optional(_sequence(*block))]
    elif not opened:
        block = [_text("\n\n"), *block]
    return _held(_sequence(*before, *block), owners)


def _either(calls: Format, answer: Answer, before: Sequence[Format], owners: Sequence[tuple[Format, str]]) -> Held:
    """Calls without a text, or a text without calls."""
    union: Format = {"type": "or", "elements": [calls, answer.part]}
    return _held(_sequence(*before, union), [*owners, (answer.part, answer.field)])


def _free() -> Format:
    """Text in which no call is opened: its reader takes the marker's spelling for the token."""
    return {"type": "grammar", "grammar": "root ::= text\n" + text_without(_DSML, "text", '""', _FREE)}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _held(form: Format, owners: Sequence[tuple[Format, str]]) -> Held:
    by_part = {id(part): field for part, field in owners}
    fields = {path: by_part[id(part)] for path, part in _parts(form, "format") if id(part) in by_part}
    text = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False, separators=(",", ":"))
    return Held(common_pb2.Constraint(structural_tag=text), fields)


def _parts(node: Any, path: str) -> Iterator[tuple[str, Format]]:
    """Formats by their paths, as the refusals name them."""
    if isinstance(node, list):
        for place, item in enumerate(node):
            yield from _parts(item, f"{path}[{place}]")
    elif isinstance(node, dict):
        yield path, node
        for name in ("elements", "content", "tags"):
            if name in node:
                yield from _parts(node[name], f"{path}.{name}")
