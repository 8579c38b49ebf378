"""A worker's load, published in the registry. Knows no engine: encoders publish theirs too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.services.runtime.process import ServiceProcess
from headrace.v1 import common_pb2

PERIOD_S = 0.5
"""How often a changed load is published. In between, routers count what they sent themselves (L22)."""


async def publish_loads(process: ServiceProcess, current: Callable[[], common_pb2.LoadReport | None]) -> None:
    """A background task: publish the load whenever it has changed."""
    last = b""
    while True:
        load = current()
        serialised = b"" if load is None else load.SerializeToString()
        if serialised != last and process.membership is not None:
            process.membership.publish(loads=(serialised,))
            last = serialised
        await asyncio.sleep(PERIOD_S)
