"""A JSON Schema in, a grammar in xgrammar's EBNF out."""

from __future__ import annotations

from collections.abc import Callable

from headrace.engine.text.json_schema.alternatives import Conjunction
from headrace.engine.text.json_schema.documents import Documents
from headrace.engine.text.json_schema.ebnf import TooManyRules
from headrace.engine.text.json_schema.emit import Emitter, Valueless
from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.expand import Expander
from headrace.engine.text.json_schema.markup import INSIDE, Parameters
from headrace.engine.text.json_schema.productive import Productive
from headrace.engine.text.json_schema.strings import JSON

MOST_BYTES = 256 * 1024
"""Largest schema that is read."""
MOST_CONTRADICTIONS = 32
"""Parts of a schema that turn out to have no value; for each one all rules are written anew."""


def schema_grammar(schema: str, *, formats: bool = False, markup: bool = False) -> str:
    """A grammar of the compact JSON texts of exactly the schema's instances, their members in the schema's order.

    `formats`: `format` is asserted; otherwise it is an annotation, as the specification has it. `markup`: a reader
    looks for V4.1's calls in the text, and no string has `｜DSML｜` in it. Raises SchemaRefused for a schema that is
    wrong, that has no instance, or that uses a keyword in a way which no grammar enforces.
    """

    def written(expander: Expander, productive: Productive, root: Conjunction) -> str:
        emitter = Emitter(expander, productive, INSIDE if markup else JSON)
        return emitter.rules.text(emitter.value(root))

    return _grammar(schema, formats, written)


def parameters_grammar(schema: str, dsml: int) -> str:
    """A grammar of the schema's objects as parameters in V4.1's markup (markup.py), whose special token has the id
    `dsml`. Raises as `schema_grammar` does."""

    def written(expander: Expander, productive: Productive, root: Conjunction) -> str:
        return Parameters(expander, productive, dsml).text(root)

    return _grammar(schema, False, written)


def _grammar(schema: str, formats: bool, written: Callable[[Expander, Productive, Conjunction], str]) -> str:
    """`written` raises Valueless for what turns out to have no value, and is asked again without it."""
    if len(schema.encode()) > MOST_BYTES:
        raise SchemaRefused(f"it is longer than {MOST_BYTES} bytes")
    documents = Documents(schema)
    expander = Expander(documents, formats)
    root = frozenset({documents.root})
    try:
        productive = Productive(expander, root)
        for _ in range(MOST_CONTRADICTIONS):
            if not productive.has_values(root):
                raise SchemaRefused("no value satisfies it")
            try:
                return written(expander, productive, root)
            except Valueless as found:
                productive.never(found.numbers)
        raise SchemaRefused(f"more than {MOST_CONTRADICTIONS} parts of it contradict themselves")
    except TooManyRules as error:
        raise SchemaRefused(str(error)) from None
    except RecursionError:
        raise SchemaRefused("it is nested too deeply") from None
