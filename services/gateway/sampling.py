"""Fields that every API names alike, as the router takes them. They have been checked by fields.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from headrace.services.runtime.errors import InvalidArgument
from headrace.v1 import common_pb2

_FLOATS: Final = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_INTEGERS: Final = ("top_k", "seed")
_TOKEN: Final = re.compile(r"[0-9]{1,10}")
Body = Mapping[str, Any]


def stops_of(given: Body) -> tuple[str, ...]:
    """The strings of `stop`, which is one or several of them."""
    stop = given.get("stop", ())
    return (stop,) if isinstance(stop, str) else tuple(stop)


def sampling_of(given: Body) -> common_pb2.SamplingParams:
    """Raises InvalidArgument."""
    wire = common_pb2.SamplingParams(n=int(given.get("n", 1)))
    for name in _FLOATS:
        if name in given:
            setattr(wire, name, float(given[name]))
    for name in _INTEGERS:
        if name in given:
            setattr(wire, name, int(given[name]))
    for token, bias in given.get("logit_bias", {}).items():
        if not _TOKEN.fullmatch(token) or int(token) >= 2**32:
            raise InvalidArgument(f"{token[:20]!r} is no token id", field="logit_bias")
        wire.logit_bias.add(token_id=int(token), bias=float(bias))
    return wire
