"""Languages of calls as a worker has them, and texts to try on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import deepseek_recipe as recipe

from headrace.engine.masks.library import xgrammar
from headrace.engine.masks.named import MARK, named_tokens
from headrace.engine.text.constraint import Constraint
from headrace.engine.text.structural_tags import from_structural_tag
from headrace.services.gateway.tool_grammars import Answer, ClientTool, Held, Wanted
from tests.services.gateway.fakes import FILE, TOKENIZER

WEATHER: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"$ref": "#/$defs/unit"},
        "at": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["c", "f", None]}},
}
CLOCK: Any = {"type": "object", "properties": {"zone": {"type": "string", "pattern": "^[A-Z]+$"}}}
GIVEN = {
    "weather": ClientTool("tools[0].function.parameters", strict=True),
    "clock": ClientTool("tools[1].function.parameters"),
}
D = "｜DSML｜"


def wanted(*, forced: bool = False, one: bool = False, answer: Answer | None = None, **schemas: Any) -> Wanted:
    """`schemas`: of the tools by their names."""
    tools = [recipe.ToolDefinition(name, parameters=schema) for name, schema in schemas.items()]
    return Wanted(tools, GIVEN, forced, one, answer)


@dataclass
class Language:
    """The language as a worker has it."""

    held: Held
    compiled: Any = field(init=False)

    def __post_init__(self) -> None:
        made = from_structural_tag(self.held.constraint.structural_tag)
        self.compiled = _compiled(made)

    def has(self, text: str | list[int]) -> bool:
        """The whole answer; markers and ends of reasoning are their tokens unless ids are given."""
        ids = TOKENIZER.encode_trusted(text) if isinstance(text, str) else text
        matcher = xgrammar.GrammarMatcher(self.compiled)
        return all(matcher.accept_token(token) for token in [*ids, FILE.eos_token_id])


def _compiled(made: Constraint) -> Any:
    special = TOKENIZER.is_special
    words = [b"" if special(token) else TOKENIZER.token_bytes(token) for token in range(TOKENIZER.size)]
    for token in named_tokens(made):
        words[token] = MARK
    info = xgrammar.TokenizerInfo(
        words, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(words), stop_token_ids=[FILE.eos_token_id]
    )
    return xgrammar.GrammarCompiler(info, cache_enabled=False).compile_structural_tag(made.text)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def invoke(name: str, *parameters: tuple[str, str, str]) -> str:
    lines = [
        f'<{D} parameter name="{key}" string="{kind}">{value}</{D} parameter>\n' for key, kind, value in parameters
    ]
    return f'<{D} invoke name="{name}">\n{"".join(lines)}</{D} invoke>\n'


def calls(*invokes: str) -> str:
    return f"<{D} calls>\n{''.join(invokes)}</{D} calls>"


CITY = ("city", "true", "Rome")
GOOD: list[tuple[str, str, str]] = [
    ("city", "true", 'a "b"\n</x> {'),
    ("days", "false", "3"),
    ("unit", "false", "null"),
    ("at", "false", "[1.5, -2e9]"),
]
