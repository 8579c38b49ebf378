"""services.router.service: what bounds the time of a request before it has been read."""

from __future__ import annotations

import pytest

from headrace.services.router.service import _time_left
from headrace.v1 import inference_pb2


@pytest.mark.parametrize(
    ("own_ms", "call_s", "left"),
    [(None, None, None), (500, None, 0.5), (500, 0.2, 0.2), (500, 3.0, 0.5), (None, 3.0, 3.0)],
)
def test_the_nearer_deadline_counts(own_ms: int | None, call_s: float | None, left: float | None) -> None:
    """L6: fetching images is part of the request's time."""
    assert _time_left(inference_pb2.GenerateRequest(timeout_ms=own_ms), call_s) == left
