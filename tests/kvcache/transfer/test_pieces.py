"""pieces.py: the merged descriptors carry exactly the pairs they were made of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.transfer.pieces import is_dense, item_addresses, merge

ITEM = 16
pairs = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=20)


def plain_twin(sources: list[int], targets: list[int]) -> list[tuple[int, int]]:
    """(source, target) address of every byte-sized ITEM, one by one."""
    return [(1000 + s * ITEM, 5000 + t * ITEM) for s, t in zip(sources, targets, strict=True)]


@given(pairs)
def test_merging_keeps_every_pair_in_order(items: list[tuple[int, int]]) -> None:
    sources, targets = [s for s, _ in items], [t for _, t in items]
    pieces = merge(item_addresses(1000, ITEM, tuple(sources)), item_addresses(5000, ITEM, tuple(targets)), ITEM)
    unrolled = [
        (int(s) + offset, int(t) + offset)
        for s, t, length in zip(pieces.source, pieces.target, pieces.length, strict=True)
        for offset in range(0, int(length), ITEM)
    ]
    assert unrolled == plain_twin(sources, targets)
    assert pieces.nbytes == len(items) * ITEM


@given(pairs)
def test_nothing_that_could_be_merged_is_left(items: list[tuple[int, int]]) -> None:
    sources, targets = (tuple(column) for column in zip(*items, strict=True))
    pieces = merge(item_addresses(0, ITEM, sources), item_addresses(0, ITEM, targets), ITEM)
    for i in range(len(pieces) - 1):
        follows_both = (
            pieces.source[i] + pieces.length[i] == pieces.source[i + 1]
            and pieces.target[i] + pieces.length[i] == pieces.target[i + 1]
        )
        assert not follows_both


def test_a_prompt_in_consecutive_rows_is_one_piece() -> None:
    rows = tuple(range(40))
    assert len(merge(item_addresses(0, ITEM, rows), item_addresses(10_000, ITEM, rows), ITEM)) == 1


def test_dense() -> None:
    assert is_dense((7,))
    assert is_dense((3, 4, 5))
    assert not is_dense((3, 5))
    assert not is_dense((4, 3))
