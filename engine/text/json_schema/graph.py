"""A walk over a graph, for automata that are written as rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar

T = TypeVar("T")


def reaching(ends: AbstractSet[T], edges: Mapping[T, Iterable[T]]) -> set[T]:
    """Nodes from which some end can be reached."""
    back: dict[T, list[T]] = {}
    for node, targets in edges.items():
        for target in targets:
            back.setdefault(target, []).append(node)
    found, queue = set(ends), list(ends)
    while queue:
        for node in back.get(queue.pop(), ()):
            if node not in found:
                found.add(node)
                queue.append(node)
    return found
