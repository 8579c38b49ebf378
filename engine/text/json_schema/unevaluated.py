"""unevaluatedItems and unevaluatedProperties, once it is known what the keywords beside them evaluate."""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.text.json_schema.alternatives import (
    ANYTHING,
    Alternative,
    Array,
    Conjunction,
    Items,
    Members,
    Object,
)
from headrace.engine.text.json_schema.errors import SchemaRefused


def close_members(one: Alternative, rest: Conjunction) -> Alternative:
    """Members that no counted keyword evaluates satisfy `rest`."""
    if not isinstance(one, Object):
        return one
    counted = [part for part in one.members if part.counts]
    if any(part.all_counted for part in counted):
        return one
    names = dict.fromkeys(name for part in counted for name, _ in part.names)
    patterns = dict.fromkeys(pattern for part in counted for pattern, _ in part.patterns)
    closing = Members(
        tuple((name, ANYTHING) for name in names),
        tuple((pattern, ANYTHING) for pattern in patterns),
        rest,
        all_counted=True,
    )
    return replace(one, members=(*one.members, closing))


def close_items(one: Alternative, rest: Conjunction) -> Alternative:
    """Items that no counted keyword evaluates satisfy `rest`."""
    if not isinstance(one, Array):
        return one
    if one.finds:
        raise SchemaRefused("beside contains, which evaluates the items that it finds", "unevaluatedItems")
    counted = [part for part in one.items if part.counts]
    if any(part.all_counted for part in counted):
        return one
    prefix = max((len(part.prefix) for part in counted), default=0)
    return replace(one, items=(*one.items, Items((ANYTHING,) * prefix, rest, all_counted=True)))
