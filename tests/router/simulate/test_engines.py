"""Engines in simulated time, against queues worked out by hand and by brute force."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.cost.curves import DecodeCurve, Floats, Ints, PrefillCurve
from headrace.router.cost.prefill import PrefillBatch
from headrace.router.simulate.cache import BlockCache, InfiniteCache, LruCache, SharedStore
from headrace.router.simulate.clock import Clock
from headrace.router.simulate.decode import DecodeReplica
from headrace.router.simulate.models import DecodeTable, PrefillTable, PublishedPrefill, balanced_requests, softplus
from headrace.router.simulate.prefill import PrefillRank
from headrace.router.simulate.request import Attempt, SimRequest

BLOCK = 512


@dataclass(frozen=True)
class OneSecondPerThousand:
    def seconds(self, batch: PrefillBatch) -> float:
        return batch.computed_tokens / 1000


def request(number: int, prompt: int, output: int = 1, prefix: str = "") -> SimRequest:
    name = prefix or f"r{number}-"
    keys = [f"{name}{block}".encode() for block in range(prompt // BLOCK)]
    return SimRequest(number, 0.0, prompt, output, keys)


def attempt(of: SimRequest, decode: int = -1) -> Attempt:
    return Attempt(of, f"{of.number}#1", 0, decode, of.prompt_tokens, of.output_tokens)


class Prefill:
    """A rank and what it did."""

    def __init__(self, cache: BlockCache | None = None, store: SharedStore | None = None, tokens: int = 4096) -> None:
        self.clock = Clock()
        self.done: dict[int, float] = {}
        self.events: list[tuple[list[bytes], list[bytes]]] = []
        self.rank = PrefillRank(
            0,
            self.clock,
            OneSecondPerThousand(),
            tokens,
            BLOCK,
            InfiniteCache() if cache is None else cache,
            store,
            lambda _, stored, removed: self.events.append((stored, removed)),
            lambda one: self.done.update({one.request.number: self.clock.now}),
        )

    def submit(self, of: SimRequest) -> Attempt:
        one = attempt(of)
        self.rank.submit(one)
        return one


def test_the_published_curve_is_the_router_s_prior() -> None:
    batch = PrefillBatch(4, 32_768, 18_900, 0.9, 0.37, 1e9)
    curve = PrefillCurve(attention=1e-7)
    expected = float(curve.seconds(4, 32_768, 18_900, 0.9, 0.37, 1e9))
    assert PublishedPrefill(curve).seconds(batch) == pytest.approx(expected)
    assert softplus(800.0) == 800.0
    assert PublishedPrefill().seconds(PrefillBatch(1, 1)) == 0.3


def test_tables_are_linear_between_points_and_beyond() -> None:
    table = PrefillTable((0.0, 1000.0, 2000.0), (10.0, 20.0, 40.0), per_request=1.0)
    assert [table.seconds(PrefillBatch(1, tokens)) * 1000 for tokens in (0, 500, 1500, 3000)] == pytest.approx(
        [11, 16, 31, 61]
    )
    grid = DecodeTable(np.array([0.0, 10.0]), np.array([0.0, 100.0]), np.array([[10.0, 20.0], [30.0, 40.0]]))
    found = grid.seconds(np.array([0, 5, 20]), np.array([0, 50, 100])) * 1000
    assert found == pytest.approx([10, 25, 60])


def test_n_star_makes_the_step_as_long_as_promised() -> None:
    running = balanced_requests(DecodeCurve(), 12_000, 0.050)
    assert running == pytest.approx(25 / (0.08 + 2e-6 * 12_000), rel=1e-4)
    with pytest.raises(ValueError, match="empty decode step"):
        balanced_requests(DecodeCurve(), 12_000, 0.020)


def test_prompts_fill_batches_and_the_last_one_is_split() -> None:
    prefill = Prefill()
    for number, tokens in enumerate((3000, 2000, 1000)):
        prefill.submit(request(number, tokens))
    assert prefill.rank.waiting_tokens == 6000
    prefill.clock.run(100.0)
    # The first starts alone when it comes; then 2,000 and 1,000 go together.
    assert prefill.done == {0: pytest.approx(4.096), 1: pytest.approx(4.096 + 1.904), 2: pytest.approx(6.0)}
    assert prefill.rank.idle
    assert prefill.rank.waiting_tokens == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), min_size=1, max_size=12))
def test_events_of_whole_batches_tell_what_the_cache_has(prompts: list[list[int]]) -> None:
    """L24: also when a prompt of a batch drives out what another one of it brings."""
    cache = LruCache(5)
    prefill = Prefill(cache, tokens=4 * BLOCK + 4)
    for number, blocks in enumerate(prompts):
        keys = [bytes([block]) * 32 for block in blocks]
        prefill.submit(SimRequest(number, 0.0, BLOCK * len(keys) + 1, 1, keys))
    prefill.clock.run(1000.0)
    told: set[bytes] = set()
    for stored, removed in prefill.events:
        assert not set(stored) & set(removed)
        told = (told | set(stored)) - set(removed)
    assert len(told) == len(cache)
    assert all(cache.leading([key], 1) for key in told)


def test_a_long_prompt_takes_as_many_batches_as_it_needs() -> None:
    prefill = Prefill()
    prefill.submit(request(0, 10_000))
    prefill.clock.run(100.0)
    assert prefill.done == {0: pytest.approx(10.0)}
    assert prefill.rank.steps == 3


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 9000)), min_size=1, max_size=15, unique_by=lambda one: one[0])
)
def test_a_rank_works_off_its_queue_like_a_plain_one(arrivals: list[tuple[float, int]]) -> None:
    """A brute-force twin: token by token, first come first served, in batches cut at 4,096 tokens."""
    arrivals = sorted(arrivals)
    prefill = Prefill()
    for number, (at, tokens) in enumerate(arrivals):
        prefill.clock.run(at)
        prefill.submit(request(number, tokens))
    prefill.clock.run(1000.0)
    left, done, now = [tokens for _, tokens in arrivals], dict[int, float](), 0.0
    while any(left):
        here = [number for number, (at, _) in enumerate(arrivals) if at <= now and left[number]]
        if not here:
            now = min(at for number, (at, _) in enumerate(arrivals) if left[number])
            continue
        budget, ends = 4096, []
        for number in here:
            taken = min(budget, left[number])
            left[number] -= taken
            budget -= taken
            if taken and not left[number]:
                ends.append(number)
        now += (4096 - budget) / 1000
        done |= dict.fromkeys(ends, now)
    assert prefill.done == {number: pytest.approx(at) for number, at in done.items()}


def test_a_hit_is_looked_up_when_the_prompt_begins_and_never_whole() -> None:
    prefill = Prefill()
    prefill.submit(request(0, 2048, prefix="same"))
    second = prefill.submit(request(1, 2048, prefix="same"))
    prefill.clock.run(1.0)
    third = prefill.submit(request(2, 2048, prefix="same"))
    prefill.clock.run(100.0)
    # The second was in the first one's batch, where nothing was cached yet; of the third the last block is computed.
    assert (second.hit_tokens, third.hit_tokens) == (0, 3 * BLOCK)
    assert prefill.events == [([f"same{n}".encode() for n in range(4)], [])]


def test_a_full_cache_forgets_the_longest_unused_and_says_so() -> None:
    cache = LruCache(4)
    keys = [bytes([n]) for n in range(6)]
    assert cache.add(keys[:3]) == (keys[:3], [])
    assert cache.leading(keys[:3], 2) == 2
    assert cache.add([keys[4], keys[5]]) == ([keys[4], keys[5]], [keys[2]])
    assert cache.leading(keys[:3], 3) == 2
    assert len(cache) == 4
    with pytest.raises(ValueError, match="holds nothing"):
        LruCache(0)


def test_the_store_serves_other_ranks_after_a_while_and_loading_takes_time() -> None:
    store = SharedStore(tokens_per_s=1024.0, delay_s=1.0)
    one, other = Prefill(store=store), Prefill(store=store)
    one.submit(request(0, 2048, prefix="same"))
    one.clock.run(2.5)
    other.clock.run(2.5)
    early = other.submit(request(1, 2048, prefix="same"))
    other.clock.run(10.0)
    late = other.submit(request(2, 4096, prefix="same"))
    assert (early.loaded_tokens, early.hit_tokens) == (0, 0)
    assert (late.hit_tokens, late.loaded_tokens) == (0, 0)
    third = Prefill(store=store)
    third.clock.run(20.0)
    loading = third.submit(request(3, 2048, prefix="same"))
    third.clock.run(30.0)
    assert (loading.hit_tokens, loading.loaded_tokens) == (3 * BLOCK, 3 * BLOCK)
    assert third.done[3] == pytest.approx(20.0 + 1.5 + 0.512)


def test_death_loses_everything_and_a_new_life_is_empty() -> None:
    prefill = Prefill()
    first, second = prefill.submit(request(0, 4096)), prefill.submit(request(1, 4096))
    prefill.clock.run(1.0)
    assert prefill.rank.die() == [first, second]
    prefill.clock.run(50.0)
    assert prefill.done == {}
    prefill.rank.come_back()
    prefill.submit(request(2, 1000))
    prefill.clock.run(60.0)
    assert prefill.done == {2: pytest.approx(51.0)}


class Decode:
    """A replica and what it did."""

    def __init__(self, ranks: int = 2, kv_tokens: int = 1_000_000, slots: int = 0) -> None:
        self.clock = Clock()
        self.first: dict[int, float] = {}
        self.done: dict[int, float] = {}
        self.replica = DecodeReplica(
            0,
            ranks,
            self.clock,
            DecodeCurve(base=10.0, per_request=1.0, per_token=0.001),
            kv_tokens,
            slots,
            lambda one: self.first.update({one.request.number: self.clock.now}),
            lambda one: self.done.update({one.request.number: self.clock.now}),
        )

    def submit(self, of: SimRequest, rank: int) -> Attempt:
        one = attempt(of, rank)
        assert self.replica.reserve(one, rank)
        self.replica.admit(one, rank)
        return one


def test_the_fullest_rank_sets_the_pace() -> None:
    decode = Decode()
    decode.submit(request(0, 1000, output=3), 0)
    decode.submit(request(1, 100, output=2), 1)
    decode.clock.run(10.0)
    # Steps of rank 0: 10 + 1 + 1.0 ms, then 1.001; the second request waits for the first step's end.
    assert decode.first == {0: 0.0, 1: pytest.approx(0.012)}
    assert decode.done == {1: pytest.approx(0.012 + 0.012001), 0: pytest.approx(0.012 + 0.012001)}
    assert decode.replica.idle


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 0.3), st.integers(1, 3000), st.integers(1, 12), st.integers(0, 1)),
        min_size=1,
        max_size=12,
        unique_by=lambda one: one[0],
    )
)
def test_a_replica_steps_like_a_plain_one(arrivals: list[tuple[float, int, int, int]]) -> None:
    """A brute-force twin that touches every request at every step."""
    arrivals = sorted(arrivals)
    decode = Decode()
    for number, (at, prompt, output, rank) in enumerate(arrivals):
        decode.clock.run(at)
        decode.submit(request(number, prompt, output), rank)
    decode.clock.run(1000.0)
    now, admitted, have, done = 0.0, set[int](), dict[int, int](), dict[int, float]()
    while len(done) < len(arrivals):
        for number, (at, _, output, _) in enumerate(arrivals):
            if at <= now and number not in admitted:
                admitted.add(number)
                have[number] = 1
                if output == 1:
                    done[number] = now
        running = [number for number in admitted if number not in done]
        if not running:
            left = [at for number, (at, *_) in enumerate(arrivals) if number not in admitted]
            now = max(now, min(left)) if left else now
            continue
        steps = []
        for rank in (0, 1):
            here = [number for number in running if arrivals[number][3] == rank]
            kv = sum(arrivals[number][1] + have[number] - 1 for number in here)
            steps.append((10.0 + len(here) + 0.001 * kv) / 1000)
        now += max(steps)
        for number in running:
            have[number] += 1
            if have[number] == arrivals[number][2]:
                done[number] = now
    assert decode.done == {number: pytest.approx(at, abs=1e-9) for number, at in done.items()}
    assert not decode.replica.kv.any()
    assert not decode.replica.booked.any()


def test_room_is_promised_up_to_the_memory_and_given_back_once() -> None:
    """L23: the rank can refuse."""
    decode = Decode(ranks=1, kv_tokens=2500, slots=2)
    first, second = attempt(request(0, 1000), 0), attempt(request(1, 1000), 0)
    assert decode.replica.reserve(first, 0)
    assert decode.replica.reserve(second, 0)
    assert not decode.replica.reserve(attempt(request(2, 100), 0), 0)  # slots
    decode.replica.release(second, 0)
    assert not decode.replica.reserve(attempt(request(3, 1600), 0), 0)  # memory
    assert decode.replica.reserve(attempt(request(4, 1400), 0), 0)
    decode.replica.die()
    decode.replica.come_back()
    decode.replica.release(first, 0)  # of an earlier life
    assert not decode.replica.booked.any()


def test_models_take_columns() -> None:
    requests: Ints = np.array([1, 2], np.int64)
    seconds: Floats = DecodeCurve().seconds(requests, np.array([10, 20], np.int64))
    assert seconds.shape == (2,)
