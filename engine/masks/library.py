"""xgrammar, imported without transformers, of which it uses classes to read tokenizers. This program reads them itself.

Whoever imports this module waits for seconds; it is imported where the first constraint is met.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


class _Nothing(ModuleType):
    """Has every class, and each is empty."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def _without_transformers() -> Iterator[None]:
    if "transformers" in sys.modules:
        yield
        return
    sys.modules["transformers"] = _Nothing("transformers")
    try:
        yield
    finally:
        del sys.modules["transformers"]


with _without_transformers():
    import xgrammar

__all__ = ["xgrammar"]
