"""Selection and candidates against plain twins, ties and empty rows included (spec §9)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.reference.compress import pool_group
from headrace.kernels.reference.selection import candidate_blocks, entries_of_blocks, index_scores, select_entries

INFINITY = float("inf")
scores_of = st.lists(st.sampled_from([-INFINITY, -1.5, 0.0, -0.0, 0.25, 0.25, 2.0]), min_size=1, max_size=24)


def best(scores: list[float], k: int) -> list[int]:
    """Higher score first, then lower position; unreachable entries never."""
    possible = [j for j, score in enumerate(scores) if score > -INFINITY]
    return sorted(sorted(possible, key=lambda j: (-scores[j], j))[:k])


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(scores_of, min_size=1, max_size=4), k=st.integers(1, 12))
def test_selection_against_sorting(rows: list[list[float]], k: int) -> None:
    width = max(map(len, rows))
    table = torch.tensor([row + [-INFINITY] * (width - len(row)) for row in rows])
    for row, chosen in zip(rows, select_entries(table, k).tolist(), strict=True):
        expected = best(row, k)
        assert chosen == expected + [-1] * (k - len(expected))


@settings(max_examples=80, deadline=None)
@given(scores=scores_of, block=st.integers(1, 5), count=st.integers(1, 4), data=st.data())
def test_candidates_against_sorting(scores: list[float], block: int, count: int, data: st.DataObject) -> None:
    """The newest visible block is always in; a block counts by its best entry; nothing visible keeps nothing."""
    visible = data.draw(st.integers(0, len(scores)))
    masked = [score if j < visible else -INFINITY for j, score in enumerate(scores)]
    ranks = [max(masked[i : i + block]) for i in range(0, len(masked), block)]
    if visible:
        ranks[(visible - 1) // block] = INFINITY
    chosen = candidate_blocks(torch.tensor([masked]), torch.tensor([visible]), block, count)
    assert chosen[0].nonzero().flatten().tolist() == best(ranks, count)
    entries = entries_of_blocks(chosen, block, len(scores))[0].tolist()
    assert entries == [j // block in best(ranks, count) for j in range(len(scores))]


def test_scores_against_the_formula() -> None:
    q, keys, weights = torch.randn(2, 3, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 3, 5)
    plain = torch.einsum("gthj,gth->gtj", torch.einsum("gthi,gji->gthj", q, keys).relu(), weights)
    torch.testing.assert_close(index_scores(q, keys, weights), plain)


def test_pooling_against_softmax() -> None:
    gates, values = torch.randn(4, 3, 6), torch.randn(4, 3, 6)
    gates[1, 0] = -INFINITY
    torch.testing.assert_close(pool_group(gates, values), (gates.softmax(1) * values).sum(1))
