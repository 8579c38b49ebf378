"""The whole way of a request through two processes: the tokens of one process, and honest numbers beside them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.engine.sampling_params import SamplingParams
from headrace.v1 import common_pb2
from tests.services.driver import Driver, make_request, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(params=["v3", "v41"])
def family(request: pytest.FixtureRequest) -> Any:
    """(driver, offline) of each family."""
    return request.getfixturevalue(request.param), request.getfixturevalue(f"{request.param}_offline")


async def test_greedy_tokens_equal_one_process(family: Any) -> None:
    """L5: one process = disaggregated, at the lengths around a block's edge and over several chunks, all at once."""
    driver, offline = family
    requests = [make_request(f"greedy{length}", prompt_of(f"g{length}", length)) for length in (1, 16, 17, 100)]
    answers = await asyncio.gather(*(driver.generate(request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        assert answer.tokens == offline.tokens(request), request.key
        usage = answer.report.usage
        length = len(request.prompt_ids)
        assert usage.cached_tokens + usage.loaded_tokens + usage.computed_tokens == usage.prompt_tokens == length
        assert usage.completion_tokens == request.max_tokens
        assert answer.finished[0].reason == common_pb2.FINISH_REASON_LENGTH


async def test_two_sampled_choices_equal_one_process(family: Any) -> None:
    """L5: seeded samples of n = 2, which share the prompt's blocks at decode."""
    driver, offline = family
    sampling = SamplingParams(temperature=0.9, top_p=0.95)
    request = make_request("sampled", prompt_of("sampled", 45), sampling=sampling, n=2, seed=99)
    answer = await driver.generate(request)
    assert answer.tokens == offline.tokens(request)
    assert answer.tokens[0] != answer.tokens[1]
    assert answer.report.usage.completion_tokens == 2 * request.max_tokens


async def test_a_known_prefix_is_not_computed_again(family: Any) -> None:
    """L5, L27: the second turn is cached at prefill, held at decode, and its tokens are those of one process."""
    driver, offline = family
    first = make_request("turn1", prompt_of("turns", 200))
    before = await driver.generate(first)
    second = make_request("turn2", (*first.prompt_ids, *prompt_of("more", 30)))
    answer = await driver.generate(second)
    assert answer.tokens == offline.tokens(second)
    report = answer.report
    assert report.usage.cached_tokens >= 160
    assert report.usage.cached_tokens + report.usage.computed_tokens == 230
    assert report.prefill.kv_bytes < before.report.prefill.kv_bytes


async def test_workers_register_what_their_kv_weighs(family: Any) -> None:
    """What the router charges to a link between data centres is the layout's."""
    driver, offline = family
    layout = offline.engine.pool.layout
    for worker in (driver.prefill, driver.decode):
        capacity = worker.replica.capacity
        assert (capacity.row_bytes, capacity.slot_bytes) == (layout.block_bytes, layout.slot_bytes)


async def test_stop_strings_end_the_text_before_the_match(v3: Driver, v3_offline: Any) -> None:
    """The completing token is delivered and counted; the text ends before the match; reason STOP."""
    plain = make_request("plain", prompt_of("stops", 33), max_tokens=24)
    (whole,) = v3_offline(plain)
    text = whole.choices[0].text
    stop = next(text[at : at + 2] for at in range(4, len(text) - 2) if "\ufffd" not in text[at : at + 2])
    request = make_request("stopped", plain.prompt_ids, max_tokens=24, stop=(stop,))
    (expected,) = v3_offline(request)
    answer = await v3.generate(request)
    assert answer.tokens[0] == expected.choices[0].token_ids
    assert answer.text.get(0, "") == expected.choices[0].text
    assert stop not in answer.text.get(0, "")
    assert answer.finished[0].reason == common_pb2.FINISH_REASON_STOP
    assert answer.finished[0].stop_string == stop


async def test_max_tokens_one_and_log_probabilities(v3: Driver, v3_offline: Any) -> None:
    """Decode emits prefill's first token, with its log-probabilities, before any step of its own."""
    request = make_request(
        "one", prompt_of("one", 20), max_tokens=1, sampling=SamplingParams(temperature=0, logprobs=2)
    )
    (expected,) = v3_offline(request)
    answer = await v3.generate(request)
    assert answer.tokens[0] == expected.choices[0].token_ids
    wanted = [each.logprob for each in expected.choices[0].logprobs]
    assert answer.logprobs[0] == pytest.approx(wanted, rel=1e-6)
    assert answer.report.usage.completion_tokens == 1


async def test_a_continuation_goes_on_where_the_first_attempt_stopped(v3: Driver, v3_offline: Any) -> None:
    """L15, L16: N₀ is kept; delivered tokens are computed, not delivered again."""
    whole = make_request("continued", prompt_of("continued", 37), max_tokens=20)
    tokens = v3_offline.tokens(whole)[0]
    rest = make_request("continued", whole.prompt_ids, max_tokens=20, delivered=(tuple(tokens[:9]),))
    v3.stream.start_at("continued", 1, {0: tokens[:9]})
    answer = await v3.generate(rest)
    assert answer.tokens[0] == tokens
    assert answer.report.usage.recomputed_tokens == 9
    assert answer.report.usage.prompt_tokens == 37
