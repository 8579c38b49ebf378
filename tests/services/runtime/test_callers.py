"""What a router tells of its caller, and to whom it cannot."""

from __future__ import annotations

from unittest.mock import AsyncMock, Mock

import grpc.aio
import pytest

from headrace.services.runtime.callers import METADATA_KEY, tell_caller, told_caller
from headrace.services.runtime.errors import Internal
from headrace.services.runtime.intercept import CallerLeft
from headrace.services.runtime.live import LiveSet, Outcome
from headrace.v1 import inference_pb2

CALLER = inference_pb2.Caller(tenant="acme", tokens=inference_pb2.RateLevel(limit=5, remaining=0))


async def test_what_is_told_is_heard() -> None:
    """With the answer's beginning and its end alike."""
    context = Mock(send_initial_metadata=AsyncMock())
    await tell_caller(context, CALLER)
    ((first,), (last,)) = context.send_initial_metadata.call_args.args, context.set_trailing_metadata.call_args.args
    assert told_caller(first) == told_caller(last) == CALLER
    assert told_caller((("other", "x"),)) is None
    assert told_caller(None) is None
    with pytest.raises(Internal):
        told_caller(((METADATA_KEY, b"\xff"),))


async def test_a_caller_who_has_left_is_no_failure() -> None:
    """L11: the request ends as cancelled."""
    live: LiveSet[int] = LiveSet("requests")
    context = Mock(send_initial_metadata=AsyncMock(side_effect=grpc.aio.InternalError("gone")))
    with pytest.raises(CallerLeft), live.at_door():
        await tell_caller(context, CALLER)
    assert (live.ended(Outcome.CANCELLED), live.ended(Outcome.FAILED)) == (1, 0)
