"""The mutators: every method's messages, anything anywhere, and always the same for the same seed."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.v1 import common_pb2, inference_pb2, prefill_pb2
from tests.fuzz.methods import CALLERS, FENCED, Method, all_methods
from tests.fuzz.mutate import MAX_BYTES, Mutator, sites
from tests.fuzz.wire_bytes import mutate_bytes

METHODS = all_methods()
seeds = st.integers(0, 2**32 - 1)


def run_request() -> prefill_pb2.RunRequest:
    spec = common_pb2.RequestSpec(token_ids=[1, 2, 3], root_key=bytes(32), priority=-1)
    spec.stop.stop.append("x")
    spec.sampling.temperature = 0.5
    return prefill_pb2.RunRequest(spec=spec, sources=[prefill_pb2.PrefixSource(blocks=1)])


@given(seeds, st.sampled_from(METHODS))
def test_whatever_is_made_is_a_message_of_the_method(seed: int, method: Method) -> None:
    """Fields are mutated, not bytes: all of it parses, so that it is the handler that has to refuse it."""
    request = method.request
    mutator = Mutator(random.Random(seed))
    blank = request()
    mutator.fill(blank)
    changed, _ = mutator.mutate(blank, 3)
    assert request.FromString(changed.SerializeToString()) is not None
    assert len(changed.SerializeToString()) < 64 * MAX_BYTES


@given(seeds)
def test_equal_seeds_make_equal_mutations_and_the_original_stays(seed: int) -> None:
    original = run_request()
    kept = original.SerializeToString(deterministic=True)
    one, two = [Mutator(random.Random(seed), [run_request()]).mutate(original, 3) for _ in range(2)]
    # NaN is unlike itself, so bytes are compared.
    assert (one[0].SerializeToString(deterministic=True), one[1]) == (
        two[0].SerializeToString(deterministic=True),
        two[1],
    )
    assert original.SerializeToString(deterministic=True) == kept


def test_every_field_and_every_kind_of_change_comes_up() -> None:
    rng = random.Random(1)
    kinds: Counter[str] = Counter()
    paths: set[str] = set()
    other = inference_pb2.GenerateRequest()
    other.sampling.logit_bias.add(token_id=4)
    for _ in range(3000):
        message = inference_pb2.GenerateRequest(snapshot_at=[16, 32])
        message.sampling.logit_bias.add(token_id=5)
        message.prompt.text.text = "x"
        for done in Mutator(rng, [other]).mutate(message)[1]:
            kind, _, path = done.rpartition(" ")
            kinds[kind] += 1
            paths.add(path)
    assert set(kinds) == {
        "drop", "switch", "append", "blow up", "shuffle", "cut", "set element",
        "empty", "refill", "cross", "set", "nudge",
    }  # fmt: skip
    assert {site.path for site in sites(message)} <= paths


def test_numbers_come_from_the_edges() -> None:
    field = common_pb2.RequestSpec.DESCRIPTOR.fields_by_name["time_left_ms"]
    seen = {Mutator(random.Random(seed)).value(field) for seed in range(200)}
    assert {0, 1, 2**63 - 1, 2**64 - 1} <= seen


@given(seeds)
def test_bytes_are_mutated_in_ways_that_parsers_do_and_do_not_take(seed: int) -> None:
    data = run_request().SerializeToString()
    changed, how = mutate_bytes(data, random.Random(seed))
    assert (changed, how) == mutate_bytes(data, random.Random(seed))


def test_some_mutated_bytes_parse_and_some_do_not() -> None:
    data = run_request().SerializeToString()
    (method,) = [method for method in METHODS if method.short == "PrefillService/Run"]
    parsed = Counter(method.parses([mutate_bytes(data, random.Random(seed))[0]]) for seed in range(500))
    assert min(parsed[True], parsed[False]) > 50


def test_somebody_calls_every_method() -> None:
    """A service that is new to the contract has to say here who calls it, or is not tried."""
    for method in METHODS:
        assert method.caller("decode-0") is not None
    shorts = {method.short for method in METHODS} | {method.service_name for method in METHODS}
    assert set(CALLERS) <= shorts
    assert set(FENCED) <= shorts
