"""The sampler against a plain one-row twin, and its independence of the batch (spec §16, §20.10)."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import distribution
from headrace.engine.rng import signed, uniform
from headrace.engine.sampler import Sampled, sample
from headrace.engine.sampling_batch import RowSampling, build_batch
from headrace.engine.sampling_params import SamplingParams

VOCAB = 40
CPU = torch.device("cpu")

biases = st.dictionaries(st.integers(0, VOCAB - 1), st.integers(-8, 8).map(float), max_size=4)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.05]),
    top_k=st.sampled_from([0, 0, 1, 5, 100]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.9]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=biases.map(lambda d: tuple(d.items())),
    logprobs=st.sampled_from([None, 0, 3]),
)
ids = st.lists(st.integers(-2, VOCAB + 5), max_size=12)
rows = st.builds(
    RowSampling,
    params=params,
    seed=st.integers(0, (1 << 64) - 1),
    position=st.integers(1, 100_000),
    prompt_ids=ids,
    output_ids=ids,
    suppressed_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3),
)


def logits_of(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def run(logits: torch.Tensor, batch: list[RowSampling]) -> Sampled:
    return sample(logits, build_batch(batch, logits.shape[-1], CPU))


def plain_sample(logits: list[float], row: RowSampling) -> int:
    """Twin: one row, float64, in the order that SamplingParams states."""
    p, z = row.params, list(logits)
    for token in set(row.prompt_ids) | set(row.output_ids):
        if 0 <= token < VOCAB:
            z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
    for token in set(row.output_ids):
        if 0 <= token < VOCAB:
            z[token] -= p.presence_penalty + p.frequency_penalty * row.output_ids.count(token)
    for token, bias in p.logit_bias:
        z[token] += bias
    for token in row.suppressed_ids:
        z[token] = -math.inf
    if p.greedy:
        return max(range(VOCAB), key=lambda i: (z[i], -i))
    z = [v / p.temperature for v in z]
    total = sum(math.exp(v - max(z)) for v in z)
    probability = [math.exp(v - max(z)) / total for v in z]
    order = sorted(range(VOCAB), key=lambda i: (-probability[i], i))
    keep, mass = set(), 0.0
    for token in order:
        if mass <= p.top_p and probability[token] >= p.min_p * probability[order[0]]:
            keep.add(token)
        mass += probability[token]
    if p.top_k:
        keep &= set(order[: p.top_k])
    u = uniform(torch.tensor([signed(row.seed)]), torch.tensor([row.position])).item()
    target, running = u * sum(probability[i] for i in keep), 0.0
    for token in range(VOCAB):
        running += probability[token] if token in keep else 0.0
        if running > target:
            return token
    raise AssertionError("the cumulative probability never exceeds its share")


@settings(max_examples=80, deadline=None)
@given(st.lists(rows, min_size=1, max_size=4), st.integers(0, 1 << 16))
def test_tokens_match_the_plain_twin(batch: list[RowSampling], seed: int) -> None:
    logits = logits_of(len(batch), seed)
    got = run(logits, batch).token_ids.tolist()
    assert got == [plain_sample(line, row) for line, row in zip(logits.double().tolist(), batch, strict=True)]


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=4), st.integers(0, 1 << 16), st.sampled_from([1.0, 0.5]))
def test_sorting_a_beginning_draws_what_sorting_all_draws(batch: list[RowSampling], seed: int, grid: float) -> None:
    """The CPU's short cut; coarse logits make equals at its edge."""
    logits = (logits_of(len(batch), seed) / grid).round() * grid
    drawn = []
    for prefixes in ((), (2, 8), (1,), (VOCAB - 1,)):
        with mock.patch.object(distribution, "PREFIXES", prefixes):
            drawn.append(run(logits, batch).token_ids.tolist())
    assert drawn == [drawn[0]] * 4


@given(st.lists(st.lists(st.integers(-3, 3), min_size=9, max_size=9), min_size=1, max_size=3), st.integers(1, 9))
def test_ranks_among_equals_follow_the_id(values: list[list[int]], count: int) -> None:
    got, ids = distribution.ranked(torch.tensor(values, dtype=torch.float32), count)
    for line, numbers in enumerate(values):
        order = sorted(range(9), key=lambda i: (-numbers[i], i))[:count]
        assert ids[line].tolist() == order
        assert got[line].tolist() == [numbers[i] for i in order]


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=2, max_size=6), st.data())
def test_a_row_does_not_see_the_batch(batch: list[RowSampling], data: st.DataObject) -> None:
    """L5, spec §20.10: any order and any company give the same tokens and log-probabilities."""
    logits = logits_of(len(batch), 7)
    whole = run(logits, batch)
    order = data.draw(st.permutations(range(len(batch))))[: data.draw(st.integers(1, len(batch)))]
    part = run(logits[order], [batch[i] for i in order])
    assert part.token_ids.tolist() == whole.token_ids[order].tolist()
    asked = [i for i, row in enumerate(batch) if row.params.logprobs is not None]
    asked_part = [i for i in order if batch[i].params.logprobs is not None]
    for place, row in enumerate(asked_part):
        assert whole.logprobs is not None
        assert part.logprobs is not None
        assert whole.top_ids is not None
        assert part.top_ids is not None
        assert part.logprobs[place] == whole.logprobs[asked.index(row)]
        top = batch[row].params.logprobs
        assert part.top_ids[place, :top].tolist() == whole.top_ids[asked.index(row), :top].tolist()


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 9]] = 4.0
    assert run(logits, [RowSampling(SamplingParams(temperature=0.0), 1, 5)]).token_ids.tolist() == [7]


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_bad_logits_give_some_token(value: float, temperature: float) -> None:
    """L13: a row of NaN ends neither the step nor the rows beside it."""
    logits = logits_of(2, 3)
    logits[0] = value
    row = RowSampling(SamplingParams(temperature=temperature, top_p=0.9, top_k=4, logprobs=2), 1, 5)
    alone = run(logits[1:], [row]).token_ids
    got = run(logits, [row, row])
    assert 0 <= int(got.token_ids[0]) < VOCAB
    assert got.token_ids[1] == alone[0]


def test_suppressed_tokens_are_never_drawn_unless_nothing_is_left() -> None:
    """min_tokens: EOS and stop ids are masked before it is reached."""
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 3] = 50.0
    row = RowSampling(SamplingParams(temperature=1.0), 9, 1, suppressed_ids=(3,))
    assert run(logits, [row]).token_ids.item() != 3
    assert run(logits, [RowSampling(SamplingParams(), 9, 1)]).token_ids.item() == 3
    everything = RowSampling(SamplingParams(), 9, 1, suppressed_ids=tuple(range(VOCAB)))
    assert 0 <= run(logits, [everything]).token_ids.item() < VOCAB


def test_log_probabilities_are_of_the_raw_logits() -> None:
    """Before temperature, penalties and truncation, and in float32 natural logarithms."""
    logits = logits_of(1, 5)
    settings_ = SamplingParams(temperature=0.4, top_k=1, logit_bias=((11, 100.0),), logprobs=4)
    got = run(logits, [RowSampling(settings_, 3, 7)])
    raw = torch.log_softmax(logits, dim=-1)
    assert got.token_ids.item() == 11
    assert got.logprobs is not None
    assert got.top_ids is not None
    assert got.top_logprobs is not None
    assert got.logprobs.item() == pytest.approx(raw[0, 11].item(), abs=1e-5)
    assert got.top_ids[0].tolist() == raw[0].topk(4).indices.tolist()
    assert torch.allclose(got.top_logprobs[0], raw[0].topk(4).values, atol=1e-5)


def test_logits_are_left_as_they_are() -> None:
    logits = logits_of(2, 8)
    before = logits.clone()
    row = RowSampling(SamplingParams(presence_penalty=1.0, logit_bias=((1, 5.0),)), 1, 1, (3,), (4, 4), (5,))
    run(logits, [row, row])
    assert torch.equal(logits, before)


def test_draws_follow_the_distribution() -> None:
    """4,000 positions of one seed: frequencies within five standard deviations."""
    count = 4000
    logits = logits_of(1, 11)
    draws = run(logits.expand(count, -1), [RowSampling(SamplingParams(), 77, position) for position in range(count)])
    probability = torch.softmax(logits[0].double(), -1)
    frequency = torch.bincount(draws.token_ids, minlength=VOCAB).double() / count
    deviation = (probability * (1 - probability) / count).sqrt()
    assert ((frequency - probability).abs() <= 5 * deviation + 1e-9).all()
