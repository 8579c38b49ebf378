"""Without C++ and with it, for tests that compare both with one twin."""

from __future__ import annotations

import pytest

from headrace.compiler import NativeUnavailable
from headrace.router.native.build import NativeRouter, load_native


def native_router() -> NativeRouter:
    """The library; skips the test, and says why, where it cannot be had."""
    try:
        return load_native()
    except NativeUnavailable as reason:
        pytest.skip(f"the native router is not available: {reason}")


def _libraries() -> list[object]:
    try:
        found = pytest.param(load_native(), id="native")
    except NativeUnavailable as reason:
        found = pytest.param(None, id="native", marks=pytest.mark.skip(f"no native router: {reason}"))
    return [pytest.param(None, id="python"), found]


LIBRARIES = _libraries()
