"""Small traces of our own."""

from __future__ import annotations

import pytest

from headrace.router.simulate.generated import Shape, generate
from headrace.router.simulate.workload import TraceColumns, columns

SHAPE = Shape(requests=600, span_s=240.0, median_blocks=30.0, median_output=60.0, spread=0.6, longest_blocks=120)


@pytest.fixture(scope="session")
def trace() -> TraceColumns:
    return columns(generate(SHAPE, seed=3))
