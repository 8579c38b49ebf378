"""JSON values as schemas compare them (JSON Schema 2020-12, Core 4.2.2): 1 equals 1.0, and true is no number."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TypeGuard

Json = None | bool | int | Decimal | str | list["Json"] | dict[str, "Json"]
"""Numbers are int or Decimal, so that 0.1 is a tenth."""


def is_number(value: object) -> TypeGuard[int | Decimal]:
    """true and false are none."""
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def type_of(value: Json) -> str:
    """Its type among the six; integers are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if is_number(value):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def identity(value: Json) -> str:
    """Equal for equal values only."""
    if is_number(value):
        number = Decimal(value)
        return f"#{number.normalize() if number else Decimal(0)}"
    if isinstance(value, list):
        return f"[{','.join(identity(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{identity(value[name])}' for name in sorted(value))}}}"
    return json.dumps(value)


def number_texts(value: int | Decimal) -> tuple[str, ...]:
    """How compact JSON may spell a number: an integral one with and without `.0`, others as the shortest float."""
    number = Decimal(value)
    if number == number.to_integral_value() and abs(number) < Decimal(10) ** 16:
        whole = str(int(number))
        return (whole, f"{whole}.0")
    return (repr(float(number)),)


def string_text(value: str) -> str:
    """Compact JSON without ASCII escaping."""
    return json.dumps(value, ensure_ascii=False)
