"""A JSON Schema in, a grammar in xgrammar's EBNF out."""

from __future__ import annotations

from headrace.engine.text.json_schema.documents import Documents
from headrace.engine.text.json_schema.ebnf import TooManyRules
from headrace.engine.text.json_schema.emit import Emitter, Valueless
from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.expand import Expander
from headrace.engine.text.json_schema.productive import Productive

MOST_BYTES = 256 * 1024
"""Largest schema that is read."""
MOST_CONTRADICTIONS = 32
"""Parts of a schema that turn out to have no value; for each one all rules are written anew."""


def schema_grammar(schema: str, *, formats: bool = False) -> str:
    """A grammar of the compact JSON texts of exactly the schema's instances, their members in the schema's order.

    `formats`: `format` is asserted; otherwise it is an annotation, as the specification has it. Raises SchemaRefused
    for a schema that is wrong, that has no instance, or that uses a keyword in a way which no grammar enforces.
    """
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
            emitter = Emitter(expander, productive)
            try:
                return emitter.rules.text(emitter.value(root))
            except Valueless as found:
                productive.never(found.numbers)
        raise SchemaRefused(f"more than {MOST_CONTRADICTIONS} parts of it contradict themselves")
    except TooManyRules as error:
        raise SchemaRefused(str(error)) from None
    except RecursionError:
        raise SchemaRefused("it is nested too deeply") from None
