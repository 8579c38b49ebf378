"""The fields of a settings section, whether it is a pydantic model or a plain dataclass of a lower layer.

The engine must run where only torch is installed, so its settings are dataclasses; pydantic validates them all the same
when a process's settings nest them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def section_fields(kind: Any) -> dict[str, FieldInfo]:
    """Fields by name; empty for what is no section."""
    if not isinstance(kind, type):
        return {}
    if issubclass(kind, BaseModel):
        return kind.model_fields
    if not dataclasses.is_dataclass(kind):
        return {}
    hints = get_type_hints(kind)
    fields = {}
    for field in dataclasses.fields(kind):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        fields[field.name] = FieldInfo(
            annotation=hints[field.name], default=default, description=field.metadata.get("description")
        )
    return fields
