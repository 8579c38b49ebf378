"""Conditional disaggregation: decode computes a prompt by itself, and nobody can tell by the tokens."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.engine.request import ImageInput
from headrace.engine.sampling_params import SamplingParams
from headrace.services.runtime.errors import from_rpc_error
from headrace.v1 import common_pb2
from tests.services.driver import Driver, make_request, prompt_of, spec_of

pytestmark = pytest.mark.asyncio(loop_scope="session")
BUDGET = 40
"""engine.max_batched_tokens of the test clusters (cluster.SMALL)."""


@pytest.fixture(params=["v3", "v41"])
def family(request: pytest.FixtureRequest) -> Any:
    """(driver, offline) of each family."""
    return request.getfixturevalue(request.param), request.getfixturevalue(f"{request.param}_offline")


async def refused(driver: Driver, spec: common_pb2.RequestSpec) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await driver.reserve(spec, compute_here=True)
    return from_rpc_error(failed.value)


async def test_tokens_equal_both_other_ways(family: Any) -> None:
    """L5, L27: as disaggregated and as one process, at the lengths around a block's edge, greedy and sampled; nothing
    was pushed, and what was computed adds up."""
    driver, offline = family
    for length in (1, 15, 16, 17, 33):
        request = make_request(f"here{length}", prompt_of(f"h{length}", length))
        expected = offline.tokens(request)
        answer = await driver.generate_here(request)
        assert answer.tokens == expected, length
        usage = answer.report.usage
        assert (usage.cached_tokens, usage.loaded_tokens, usage.computed_tokens) == (0, 0, length)
        assert usage.completion_tokens == request.max_tokens
        assert answer.report.prefill.kv_bytes == 0
        assert answer.report.prefill.computed_tokens == length
        away = replace(request, key=replace(request.key, request_id=f"away{length}"))
        assert (await driver.generate(away)).tokens == expected, length


async def test_sampled_choices_equal(family: Any) -> None:
    """L5: n = 2 forks after the prompt as it does where rows were landed."""
    driver, offline = family
    sampling = SamplingParams(temperature=0.9, top_p=0.95)
    request = make_request("here2", prompt_of("sampled here", 29), sampling=sampling, n=2, seed=7)
    answer = await driver.generate_here(request)
    assert answer.tokens == offline.tokens(request)
    assert answer.tokens[0] != answer.tokens[1]


async def test_beside_handed_over_requests(family: Any) -> None:
    """L5: in the same steps as requests that came from prefill."""
    driver, offline = family
    away = [make_request(f"mixed-away{index}", prompt_of(f"ma{index}", 50 + index)) for index in range(3)]
    here = [make_request(f"mixed-here{index}", prompt_of(f"mh{index}", 5 + index)) for index in range(3)]
    answers = await asyncio.gather(
        *(driver.generate(request) for request in away), *(driver.generate_here(request) for request in here)
    )
    for request, answer in zip((*away, *here), answers, strict=True):
        assert answer.tokens == offline.tokens(request), request.key


async def test_a_next_turn_is_small_where_the_last_one_lived(v3: Driver, v3_offline: Any) -> None:
    """L27: the first turn was handed over; decode has its blocks, so the second turn is computed there although its
    prompt is many times a step's budget."""
    first = make_request("chat1", prompt_of("a long chat", 150))
    said = (await v3.generate(first)).tokens[0]
    second = make_request("chat2", (*first.prompt_ids, *said, *prompt_of("and now", 10)))
    answer = await v3.generate_here(second)
    assert answer.tokens == v3_offline.tokens(second)
    usage = answer.report.usage
    assert usage.cached_tokens >= 144
    assert usage.cached_tokens + usage.computed_tokens == len(second.prompt_ids)


async def test_what_no_step_has_room_for_is_refused(v3: Driver) -> None:
    """L12, L23: decode decides atomically, and says when to come back; nothing of it is kept."""
    large = spec_of(make_request("too large", prompt_of("large", BUDGET + 1)), v3.decode, router=v3.router)
    error = await refused(v3, large)
    assert error.code == common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    assert error.retry_after_s > 0
    assert "a step has room for 40" in str(error)
    # Prompts that wait for their turn count: the second of two halves does not fit beside the first.
    half = [make_request(f"half{index}", prompt_of(f"half{index}", BUDGET // 2 + 1)) for index in range(2)]
    specs = [spec_of(request, v3.decode, router=v3.router) for request in half]
    await v3.reserve(specs[0], compute_here=True)
    assert (await refused(v3, specs[1])).code == common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    assert await v3.release(specs[0].id)


async def test_asked_twice_it_answers_the_same(v3: Driver, v3_offline: Any) -> None:
    """L23: idempotent by (request, attempt); but a reservation for a landing is another one."""
    request = make_request("twice here", prompt_of("twice here", 20))
    spec = spec_of(request, v3.decode, router=v3.router)
    first = await v3.reserve(spec, compute_here=True)
    again = await v3.reserve(spec, compute_here=True)
    assert (first.lease_ms, first.held_blocks) == (again.lease_ms, again.held_blocks)
    assert again.load.slots_used == first.load.slots_used
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await v3.reserve(spec)
    assert failed.value.code() is grpc.StatusCode.ABORTED
    v3.stream.keep(spec.id)
    assert (await v3.stream.complete(spec.id)).tokens == v3_offline.tokens(request)


async def test_the_highest_attempt_wins_whoever_computes_it(v3: Driver, v3_offline: Any) -> None:
    """L16: a second attempt by the way of prefill ends the first, which was to be computed here; its slot is free."""
    request = make_request("overtaken here", prompt_of("overtaken", 20))
    first, second = (spec_of(request, v3.decode, attempt=attempt, router=v3.router) for attempt in (1, 2))
    before = (await v3.reserve(first, compute_here=True)).load.slots_used
    reserved = await v3.reserve(second)
    assert reserved.load.slots_used == before
    await v3.stream.until("the first one's end", lambda: bool(v3.stream.answer(first.id).finished))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await v3.reserve(first, compute_here=True)
    assert failed.value.code() is grpc.StatusCode.ABORTED
    v3.stream.keep(second.id)
    assert [response async for response in v3.run(second, reserved)][-1].HasField("handed_over")
    assert (await v3.stream.complete(second.id)).tokens == v3_offline.tokens(request)


async def test_without_a_router_that_renews_it_ends(v3: Driver) -> None:
    """L8: its lease is a reservation's."""
    spec = spec_of(make_request("nobody here", prompt_of("nobody", 20)), v3.decode, router=v3.router)
    await v3.reserve(spec, compute_here=True)
    await v3.stream.until("its end", lambda: bool(v3.stream.answer(spec.id).finished))
    assert v3.stream.answer(spec.id).finished[0].reason == common_pb2.FINISH_REASON_CANCELLED


async def test_pictures_are_not_decodes(v41: Driver, v41_offline: Any) -> None:
    """L13: decode has no embeddings, and says so before anything is booked."""
    marker = v41_offline.engine.engine.limits.image_token_id
    request = make_request(
        "picture here",
        (5, *[marker] * 6, 7),
        images=(ImageInput(1, 6, hashlib.sha256(b"picture").digest()),),
    )
    error = await refused(v41, spec_of(request, v41.decode, router=v41.router))
    assert error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert "embeddings" in str(error)
