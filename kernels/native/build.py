"""The kernels' library, compiled at first use (compiler.py) and loaded.

It uses the OpenMP runtime that torch brought, found in the process: a second runtime would keep a second team of
threads spinning on the same cores.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from headrace.compiler import NativeUnavailable, compiled

_UNIT = Path(__file__).parent / "mla.cpp"
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno")
"""-fopenmp compiles the pragmas; linking without it leaves the runtime to the process (torch's)."""


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded library."""

    handle: ctypes.CDLL
    path: Path


@cache
def load_native() -> NativeLibrary:
    """Build if needed and load. Takes about 10 s the first time, milliseconds later.

    Raises:
        NativeUnavailable: no compiler (g++ or $CXX), it failed, or torch's OpenMP runtime was not found.
    """
    path = compiled(_UNIT, _FLAGS, without="run with native_kernels = false")
    _share_openmp()
    try:
        library = NativeLibrary(ctypes.CDLL(str(path)), path)
    except OSError as error:
        raise NativeUnavailable(f"{path} does not load: {error}") from error
    _declare(library.handle)
    _self_test(library)
    return library


def _declare(handle: ctypes.CDLL) -> None:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    handle.headrace_vector_lanes.restype = integer
    handle.headrace_product.argtypes = [pointer] * 3 + [integer] * 5
    handle.headrace_product.restype = None
    handle.headrace_exp.argtypes = [pointer, pointer, integer]
    handle.headrace_exp.restype = None
    handle.headrace_workspace_new.restype = pointer
    handle.headrace_workspace_free.argtypes = [pointer]
    handle.headrace_workspace_free.restype = None
    handle.headrace_mla_step.argtypes = [pointer] * 3
    handle.headrace_mla_step.restype = None


def native_product(library: NativeLibrary, x: torch.Tensor, weight: torch.Tensor, *, packed: bool) -> torch.Tensor:
    """``x [m, k] float32 · weight [n, k]ᵀ`` (float32 or bf16) on one thread; packed allows the order of packed.h."""
    out = torch.empty(x.shape[0], weight.shape[0])
    (m, k), n = x.shape, weight.shape[0]
    library.handle.headrace_product(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), m, n, k, weight.dtype.itemsize, packed
    )
    return out


def native_exp(library: NativeLibrary, x: torch.Tensor) -> torch.Tensor:
    """e^x of a float32 vector whose length is a multiple of 16."""
    out = torch.empty_like(x)
    library.handle.headrace_exp(x.data_ptr(), out.data_ptr(), x.numel())
    return out


def _self_test(library: NativeLibrary) -> None:
    """A few products and exponentials against torch: this processor's variant may never have run elsewhere."""
    generator = torch.Generator().manual_seed(1)
    for m, n, k in ((1, 13, 40), (5, 21, 64), (30, 50, 72)):
        x = torch.randn(m, k, generator=generator)
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.randn(n, k, generator=generator).to(dtype)
            expected = x.double() @ weight.double().T
            for packed in (False, True):
                got = native_product(library, x, weight, packed=packed)
                if not (got - expected).abs().max() <= 1e-4:
                    raise NativeUnavailable(f"{library.path} computes a wrong {m} × {n} × {k} product in {dtype}")
    x = torch.linspace(-80, 20, 64)
    if not (native_exp(library, x) / x.double().exp() - 1).abs().max() <= 1e-6:
        raise NativeUnavailable(f"{library.path} computes a wrong exponential")


def _share_openmp() -> None:
    """Make torch's OpenMP runtime visible to libraries loaded later.

    Raises:
        NativeUnavailable: torch was built with another runtime.
    """
    folders = (Path(torch.__file__).parent / "lib", Path(torch.__file__).parent.parent / "torch.libs")
    for folder in folders:
        for runtime in sorted(folder.glob("libgomp*.so*")):
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
            return
    try:
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        raise NativeUnavailable("no libgomp beside torch or in the system; install libgomp1") from None


def main() -> None:
    """Compile ahead of time; exit status 1 and the reason where that is impossible."""
    try:
        sys.stdout.write(f"{load_native().path}\n")
    except NativeUnavailable as reason:
        sys.exit(str(reason))


if __name__ == "__main__":
    main()
