"""Why a schema is refused."""

from __future__ import annotations

from headrace.engine.text.errors import TextError


class SchemaRefused(TextError):
    """A schema that is wrong or that a grammar cannot enforce. `keyword` is the one at fault, or ``""``."""

    def __init__(self, reason: str, keyword: str = "") -> None:
        super().__init__(f"{keyword}: {reason}" if keyword else reason)
        self.reason = reason
        self.keyword = keyword
