"""Documented fields of plain settings dataclasses."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

T = TypeVar("T")
DESCRIPTION = "description"
"""Key of a field's documentation in its metadata."""


def described(default: T, text: str) -> T:
    """A dataclass field with a default and its documentation. Typed as its value, as `dataclasses.field` is."""
    if dataclasses.is_dataclass(default):
        frozen: T = dataclasses.field(default_factory=lambda: default, metadata={DESCRIPTION: text})
        return frozen
    field: T = dataclasses.field(default=default, metadata={DESCRIPTION: text})
    return field


def require(holds: bool, name: str, rule: str) -> None:
    """Raises ValueError naming the field and its rule unless `holds`."""
    if not holds:
        raise ValueError(f"{name} {rule}")
