"""Time models from a TOML file: other constants of the curves, or tables measured on an engine.

    [prefill]                          [decode]
    kind = "table"                     kind = "table"
    computed_tokens = [512, 8192]      requests = [1, 64]
    ms = [18.0, 160.0]                 kv_tokens = [0, 1000000]
                                       ms = [[9.0, 11.0], [14.0, 17.5]]

`kind = "curve"` takes the fields of cost/curves.py in their place; those that are left away keep the published value.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise

import numpy as np

from headrace.router.cost.curves import DecodeCurve, PrefillCurve
from headrace.router.simulate.models import DecodeModel, DecodeTable, PrefillModel, PrefillTable, PublishedPrefill


class EngineFileError(ValueError):
    """The file describes no engine; says where and why."""


def parse(text: str) -> tuple[PrefillModel, DecodeModel]:
    """(prefill, decode); a table that is left away is the published curve. Raises EngineFileError."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise EngineFileError(f"the engine file is no valid TOML: {error}") from error
    if unknown := set(document) - {"prefill", "decode"}:
        raise EngineFileError(f"{', '.join(sorted(unknown))}: an engine file has [prefill] and [decode]")
    return _prefill(document.get("prefill", {})), _decode(document.get("decode", {}))


def _prefill(table: object) -> PrefillModel:
    kind, values = _kind("prefill", table)
    if kind == "curve":
        return PublishedPrefill(PrefillCurve(**_numbers("prefill", values, PrefillCurve)))
    tokens = _series("prefill.computed_tokens", values.pop("computed_tokens", None))
    ms = _series("prefill.ms", values.pop("ms", None))
    if len(tokens) != len(ms):
        raise EngineFileError(f"prefill: {len(tokens)} computed_tokens and {len(ms)} ms")
    _rising("prefill.computed_tokens", tokens)
    return PrefillTable(tokens, ms, **_numbers("prefill", values, PrefillTable))


def _decode(table: object) -> DecodeModel:
    kind, values = _kind("decode", table)
    if kind == "curve":
        return DecodeCurve(**_numbers("decode", values, DecodeCurve))
    requests = _series("decode.requests", values.pop("requests", None))
    tokens = _series("decode.kv_tokens", values.pop("kv_tokens", None))
    rows = values.pop("ms", None)
    if values:
        raise EngineFileError(f"decode: {', '.join(sorted(values))} is unknown in a table")
    _rising("decode.requests", requests)
    _rising("decode.kv_tokens", tokens)
    if not isinstance(rows, list) or len(rows) != len(requests):
        raise EngineFileError(f"decode.ms needs a row for each of the {len(requests)} requests")
    grid = [_series(f"decode.ms[{number}]", row) for number, row in enumerate(rows)]
    if any(len(row) != len(tokens) for row in grid):
        raise EngineFileError(f"decode.ms needs {len(tokens)} columns in each row, one for each of kv_tokens")
    return DecodeTable(np.array(requests), np.array(tokens), np.array(grid))


def _kind(name: str, table: object) -> tuple[str, dict[str, object]]:
    if not isinstance(table, Mapping):
        raise EngineFileError(f"{name} is no table")
    values = dict(table)
    kind = values.pop("kind", "curve")
    if kind not in ("curve", "table"):
        raise EngineFileError(f"{name}.kind = {kind!r} is neither curve nor table")
    return str(kind), values


def _numbers(name: str, values: Mapping[str, object], model: type) -> dict[str, float]:
    known = {one.name for one in fields(model)}
    if unknown := set(values) - known:
        raise EngineFileError(f"{name}: {', '.join(sorted(unknown))} is unknown; it takes {', '.join(sorted(known))}")
    return {key: _number(f"{name}.{key}", value) for key, value in values.items()}


def _series(name: str, value: object) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) < 2:
        raise EngineFileError(f"{name} is no list of at least two numbers")
    return tuple(_number(name, item) for item in value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise EngineFileError(f"{name}: {value!r} is no number of at least 0")
    return float(value)


def _rising(name: str, values: tuple[float, ...]) -> None:
    if any(later <= earlier for earlier, later in pairwise(values)):
        raise EngineFileError(f"{name} has to rise from each value to the next")
