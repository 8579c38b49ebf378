"""The router's library, compiled at first use (headrace/compiler.py) and loaded."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Final

from headrace.compiler import NativeUnavailable, compiled
from headrace.router.native import structs

_UNIT: Final = Path(__file__).parent / "router.cpp"
_FLAGS: Final = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off")
"""Without contraction every sum is rounded as numpy rounds it, and equal costs stay equal."""


class NativeRouter:
    """The loaded library's functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.match_blocks = library.headrace_match_blocks
        self.match_snapshots = library.headrace_match_snapshots
        self.choose_pair = library.headrace_choose_pair
        for function, arguments in ((self.match_blocks, 2), (self.match_snapshots, 2), (self.choose_pair, 6)):
            function.argtypes = [ctypes.c_void_p] * arguments
            function.restype = None
        sizes = library.headrace_router_sizes
        sizes.argtypes, sizes.restype = [ctypes.c_int64], ctypes.c_int64
        for which, structure in enumerate(structs.ALL):
            if sizes(which) != ctypes.sizeof(structure):
                raise NativeUnavailable(f"{structure.__name__} has {sizes(which)} bytes in C++, others here")


@cache
def load_native() -> NativeRouter:
    """Build if needed and load. Takes a second or two the first time, milliseconds later.

    Raises:
        NativeUnavailable: no compiler (g++ or $CXX), it failed, or what it made does not load.
    """
    path = compiled(_UNIT, _FLAGS, without="let Python decide")
    try:
        return NativeRouter(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path} does not load: {error}") from error


def main() -> None:
    """Compile ahead of time; exit status 1 and the reason where that is impossible."""
    try:
        load_native()
    except NativeUnavailable as reason:
        sys.exit(str(reason))


if __name__ == "__main__":
    main()
