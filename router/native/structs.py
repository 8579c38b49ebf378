"""The structures of index.h and decide.h, field by field. Pointers are addresses of numpy arrays that others own."""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np
import numpy.typing as npt

_POINTER, _INTEGER, _NUMBER, _BITS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_uint64


def address(array: npt.NDArray[np.generic]) -> int:
    """Where the array's first element lies, for as long as the array lives."""
    found: int = array.__array_interface__["data"][0]
    return found


class IndexColumns(ctypes.Structure):
    """index.h"""

    _fields_ = (
        ("places", _POINTER),
        ("mask", _BITS),
        ("low", _POINTER),
        ("high", _POINTER),
        ("words", _POINTER),
        ("ticks", _POINTER),
        ("arena", _POINTER),
    )


class Prompt(ctypes.Structure):
    """index.h"""

    _fields_ = (
        ("keys", ctypes.c_char_p),
        ("count", _INTEGER),
        ("stored", _INTEGER),
        ("lent", ctypes.c_char_p),
        ("tick", _INTEGER),
        ("ranks", _INTEGER),
        ("device", _POINTER),
        ("local", _POINTER),
        ("mixed", _POINTER),
        ("shared", _INTEGER),
        ("longest", _INTEGER),
        ("same", _INTEGER),
        ("further", _INTEGER),
    )


class Tables(ctypes.Structure):
    """decide.h"""

    _fields_ = tuple((name, _POINTER) for name in ("own", "since", "reported", "reported_at", "assigned"))


class Ranks(ctypes.Structure):
    """decide.h"""

    _fields_ = (
        ("count", _INTEGER),
        ("numbers", _POINTER),
        ("rows", _POINTER),
        ("slots", _POINTER),
        ("block_tokens", _POINTER),
        ("replica", _POINTER),
        ("replicas", _INTEGER),
        ("seeds", _POINTER),
        ("slowness", _POINTER),
        ("fits", _POINTER),
    )


class PrefillTerms(ctypes.Structure):
    """decide.h"""

    _fields_ = (
        ("per_new", _NUMBER),
        ("per_hit", _NUMBER),
        ("per_pair", _NUMBER),
        ("grid_s", _POINTER),
        ("grid_points", _INTEGER),
        ("grid_step", _NUMBER),
        ("grid_scale", _NUMBER),
        ("alone_per_new", _NUMBER),
        ("alone_per_hit", _NUMBER),
        ("alone_with_hit", _NUMBER),
        ("alone_scale", _NUMBER),
        ("host_delay", _NUMBER),
        ("host_rate", _NUMBER),
        ("shared_delay", _NUMBER),
        ("shared_rate", _NUMBER),
        ("weight", _NUMBER),
        ("idle_weight", _NUMBER),
        ("attention_share", _NUMBER),
        ("objective", _NUMBER),
        ("sample_token_s", _NUMBER),
    )


class DecodeTerms(ctypes.Structure):
    """decide.h"""

    _fields_ = tuple((name, _NUMBER) for name in ("base", "per_request", "per_token", "usual_tokens", "full"))


class Request(ctypes.Structure):
    """decide.h"""

    _fields_ = (
        ("prompt_tokens", _INTEGER),
        ("choices", _INTEGER),
        ("now", _NUMBER),
        ("oldest", _NUMBER),
        ("left", _NUMBER),
        ("affinity", _BITS),
        ("device", _POINTER),
        ("local", _POINTER),
        ("mixed", _POINTER),
        ("known", _INTEGER),
        ("shared", _INTEGER),
        ("pending", _POINTER),
        ("pending_depths", _POINTER),
        ("pendings", _INTEGER),
        ("prefill", _INTEGER),
        ("decode", _INTEGER),
        ("cached", _NUMBER),
        ("local_tokens", _NUMBER),
        ("hit", _NUMBER),
        ("work", _NUMBER),
        ("load", _NUMBER),
        ("ttft", _NUMBER),
        ("pace", _NUMBER),
        ("alone", _INTEGER),
    )


ALL: Final = (IndexColumns, Prompt, Tables, Ranks, PrefillTerms, DecodeTerms, Request)
"""In the order of headrace_router_sizes."""
