"""L5: in batch-invariant mode the bytes of a row do not depend on the rows beside it, their number, or the threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from headrace.kernels.ops import Routing
from headrace.kernels.reference.engram import engram_constants
from headrace.kernels.reference.rope import rope_frequencies, rope_table
from headrace.kernels.select import select
from headrace.kernels.weights import Fp8Rows, Swiglu

ROWS = 67
OPS = select(torch.device("cpu"), batch_invariant=True).ops

Rows = Callable[[torch.Tensor], torch.Tensor]
"""An operator as a function of the indices of the rows it is given."""


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale


def swiglu_weights(hidden: int, inner: int, seed: int) -> Swiglu:
    return Swiglu(
        random(inner, hidden, seed=seed, scale=0.1),
        random(inner, hidden, seed=seed + 1, scale=0.1),
        random(hidden, inner, seed=seed + 2, scale=0.1),
    )


def operators(hidden: int, width: int) -> dict[str, Rows]:
    x = random(ROWS, hidden)
    weight = random(width, hidden, scale=0.1)
    streams, out = random(ROWS, 4, hidden), random(ROWS, hidden, seed=7)
    fn, base = random(24, 4 * hidden, scale=0.05), random(24, scale=0.1)
    mixes = OPS.hyper_mixes(streams, fn, torch.ones(3), base, norm_eps=1e-20, hc_eps=1e-6, iterations=20)
    cos, sin = rope_table(torch.arange(ROWS) * 977, rope_frequencies(32, 1e4))
    heads = random(ROWS, 3, 64)
    constants = engram_constants((1,), 4, 2, 101, 300)
    context = torch.randint(0, 300, (ROWS, 4), generator=torch.Generator().manual_seed(1))
    table = Fp8Rows(
        random(int(constants.table_rows[0]), 32).to(torch.float8_e4m3fn),
        torch.full((int(constants.table_rows[0]), 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    )
    mask = torch.arange(ROWS) % 5 == 0
    gate, bias = random(8, hidden, scale=0.2), random(8, scale=0.1)
    experts = [swiglu_weights(hidden, width, 10 * i) for i in range(8)]
    routing = OPS.route(x, gate, bias, None, None, top_k=2, scale=1.5)

    places, sink = random(ROWS, 22, 64), random(3)
    valid = torch.rand(ROWS, 22, generator=torch.Generator().manual_seed(2)) > 0.3
    entries, entry_weights = random(1, 37, 64), random(1, ROWS, 3, seed=6)
    scores = OPS.index_scores(heads.unsqueeze(0), entries, entry_weights)[0]
    visible = torch.arange(ROWS) % 38
    unreachable = torch.arange(37) >= visible.unsqueeze(1)
    gates, values = random(ROWS, 2, 64, seed=8), random(ROWS, 2, 64, seed=9)

    def mixed(i: torch.Tensor) -> torch.Tensor:
        parts = OPS.hyper_mixes(streams[i], fn, torch.ones(3), base, norm_eps=1e-20, hc_eps=1e-6, iterations=20)
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def routed(i: torch.Tensor) -> torch.Tensor:
        chosen = OPS.route(x[i], gate, bias, -bias, mask[i], top_k=2, scale=1.5)
        return torch.cat((chosen.experts.float(), chosen.weights), dim=1)

    def routed_grouped(i: torch.Tensor) -> torch.Tensor:
        chosen = OPS.route_grouped(x[i], gate, bias, top_k=3, groups=4, top_groups=2, scale=2.5, normalise=True)
        return torch.cat((chosen.experts.float(), chosen.weights), dim=1)

    return {
        "linear": lambda i: OPS.linear(x[i], weight),
        "linear_bias": lambda i: OPS.linear(x[i], weight, random(width, seed=3)),
        "linear_fp32": lambda i: OPS.linear_fp32(x[i].bfloat16(), weight.bfloat16()),
        "rms_norm": lambda i: OPS.rms_norm(x[i], random(hidden), 1e-20),
        "rope": lambda i: OPS.rope(heads[i], cos[i], sin[i]),
        "rope_halves": lambda i: OPS.rope_halves(heads[i], cos[i], sin[i], inverse=True),
        "round_trip_e4m3": lambda i: OPS.round_trip_e4m3(heads[i]),
        "round_trip_fp4_index": lambda i: OPS.round_trip_fp4_index(heads[i]),
        "round_trip_fp4_main": lambda i: OPS.round_trip_fp4_main(heads[i]),
        "hyper_mixes": mixed,
        "hyper_collapse": lambda i: OPS.hyper_collapse(streams[i], mixes.pre[i]),
        "hyper_expand": lambda i: OPS.hyper_expand(out[i], streams[i], mixes.post[i], mixes.combine[i]),
        "engram_hash": lambda i: OPS.engram_hash(
            context[i], constants.multipliers[0], constants.primes[0], constants.offsets[0]
        ),
        "engram_lookup": lambda i: OPS.engram_lookup(context[i], table, torch.float32),
        "engram_gate": lambda i: OPS.engram_gate(
            streams[i], streams[i] * 0.3, out[i], random(4, hidden), random(4, hidden, seed=5), mask[i], 1e-20
        ),
        "route": routed,
        "route_grouped": routed_grouped,
        "swiglu": lambda i: OPS.swiglu(x[i], experts[0], limit=1.5, row_weight=routing.weights[i, 0]),
        "pool_group": lambda i: OPS.pool_group(gates[i], values[i]),
        "index_scores": lambda i: OPS.index_scores(heads[i].unsqueeze(0), entries, entry_weights[:, i])[0],
        "select_entries": lambda i: OPS.select_entries(scores[i].masked_fill(unreachable[i], float("-inf")), 7),
        "candidate_blocks": lambda i: OPS.candidate_blocks(
            scores[i].masked_fill(unreachable[i], float("-inf")), visible[i], 4, 3
        ),
        "sparse_attention": lambda i: OPS.sparse_attention(heads[i], places[i], valid[i], sink, 0.125),
        "experts": lambda i: OPS.experts(x[i], Routing(routing.experts[i], routing.weights[i]), experts, limit=1.5),
    }


NAMES = list(operators(32, 16))


@pytest.mark.parametrize(("threads", "hidden", "width"), [(1, 128, 40), (3, 96, 24), (2, 576, 192)])
@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_see_each_other(name: str, threads: int, hidden: int, width: int) -> None:
    """L5: any number of rows, any neighbours, any order, any thread count: the same bytes."""
    run = operators(hidden, width)[name]
    torch.set_num_threads(1)
    whole = run(torch.arange(ROWS))
    torch.set_num_threads(threads)
    shuffled = torch.randperm(ROWS, generator=torch.Generator().manual_seed(4))
    subsets = [torch.arange(n) for n in (1, 2, 3, 5, 7, 8, 13, 33)]
    subsets += [torch.tensor([40]), torch.arange(9, 20), shuffled, shuffled[:6], torch.arange(ROWS)]
    for rows in subsets:
        assert torch.equal(run(rows), whole[rows]), f"rows {rows.tolist()[:8]}… of {len(rows)}"


@pytest.mark.parametrize(("inner", "width"), [(1024, 8), (1536, 40)])
def test_threads_do_not_share_a_long_sum(inner: int, width: int) -> None:
    """L5: with an inner dimension that a library would split over threads."""
    x, weight = random(ROWS, inner), random(width, inner, scale=0.1)
    torch.set_num_threads(1)
    whole = OPS.linear(x, weight)
    assert torch.allclose(whole, x @ weight.T, rtol=1e-4, atol=1e-4)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (torch.arange(ROWS), torch.arange(1), torch.arange(30, 50)):
            assert torch.equal(OPS.linear(x[rows], weight), whole[rows])
