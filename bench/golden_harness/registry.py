"""Which function computes the outputs of a family's cases."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import TypeVar

from bench.golden_harness import families
from bench.golden_harness.case import Case, Tensors

Runner = Callable[[Case], Tensors]
_R = TypeVar("_R", bound=Runner)

_runners: dict[str, Runner] = {}


def runner(family: str) -> Callable[[_R], _R]:
    """Register the decorated function for ``family``."""

    def register(run: _R) -> _R:
        if family in _runners:
            raise ValueError(f"family {family!r} has a runner already: {_runners[family].__module__}")
        _runners[family] = run
        return run

    return register


def runners() -> dict[str, Runner]:
    """Runner of every family, after importing all modules of ``families/``."""
    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")
    return dict(_runners)
