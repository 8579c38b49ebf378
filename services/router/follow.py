"""Decode's events of one attempt, from its feed until its report or the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from headrace.services.router.attach import Feed
from headrace.services.router.place import Placed
from headrace.services.router.workers import Workers
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import DeadlineExceeded
from headrace.v1 import decode_pb2

DEADLINE_GRACE_S = 1.0
"""Decode ends a request at its deadline and says so; only if it does not, this router does."""


async def follow(
    workers: Workers, feed: Feed, placed: Placed, deadline: float, clock: Clock
) -> AsyncGenerator[decode_pb2.RequestEvents, None]:
    """Hand events on, and tell decode as they are taken. Raises what ended the feed.

    Failures and the deadline come through the feed, too: one wait per event and no task of its own, as this runs once
    for every token event of every request.
    """
    grace = deadline + DEADLINE_GRACE_S - clock.monotonic()
    passed = DeadlineExceeded("the deadline passed at the workers")
    overdue = asyncio.get_running_loop().call_later(max(0.0, grace), feed.put, passed)
    try:
        complete = False
        while not complete:
            events = await feed.next()
            complete = events.HasField("report")
            if complete:
                workers.balance.finished(events.report.usage.completion_tokens, placed.routing.choices)
            yield events
            feed.consume(sum(len(tokens.token_ids) for tokens in events.tokens))
    finally:
        overdue.cancel()
