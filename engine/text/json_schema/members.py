"""What a name in an object means."""

from __future__ import annotations

from headrace.engine.text.json_schema.alternatives import Conjunction, Object
from headrace.engine.text.json_schema.patterns import found_in


def members_of(one: Object, name: str) -> Conjunction:
    """What the value of a member of this name has to satisfy."""
    out: set[int] = set()
    for part in one.members:
        named = [value for known, value in part.names if known == name]
        named += [value for pattern, value in part.patterns if found_in(pattern, name)]
        for value in named or [part.rest]:
            out |= value
    return frozenset(out)
