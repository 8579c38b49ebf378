"""L5: in batch_invariant mode a row's bytes and logits do not depend on batch, chunking, prefill or decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LENGTH = 150
"""Crosses a 128-key tile and several blocks of 16."""


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("native", [False, True])
def test_rows_and_logits_are_the_same_bytes_by_every_way(
    native: bool, make_tiny: Callable[..., Any], driver: Callable[..., Any]
) -> None:
    """L5: one chunk, random chunks, decode steps, and random company: equal bytes."""
    model = make_tiny().load(batch_invariant=True, native_kernels=native)
    ids = prompt(1, LENGTH)
    whole = driver(model)
    logits = whole.run(0, ids, LENGTH)
    rows = whole.row_bytes(0)

    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        cuts=st.lists(st.integers(1, LENGTH - 1), max_size=6, unique=True).map(sorted),
        company=st.lists(st.integers(1, 9), min_size=0, max_size=3),
        decode_tail=st.integers(0, 5),
    )
    def check(cuts: list[int], company: list[int], decode_tail: int) -> None:
        run = driver(model)
        tail = LENGTH - decode_tail
        bounds = [0, *[cut for cut in cuts if cut < tail], tail, *range(tail + 1, LENGTH + 1)]
        for start, end in pairwise(bounds):
            others = [(key + 1, prompt(start + key, size)) for key, size in enumerate(company)]
            mine = run.step([*others[:1], (0, ids[start:end]), *others[1:]])[1 if others else 0]
            assert torch.equal(mine, logits[start:end])
        assert torch.equal(run.row_bytes(0), rows)

    check()


def test_threads_do_not_show(make_tiny: Callable[..., Any], driver: Callable[..., Any], two_threads: None) -> None:
    """L5: prefill on one core and decode on another machine's two give the same bytes."""
    model = make_tiny().load(batch_invariant=True)
    ids = prompt(2, LENGTH)
    two = driver(model)
    with_two = two.run(0, ids, 50)
    torch.set_num_threads(1)
    one = driver(model)
    assert torch.equal(one.run(0, ids, LENGTH), with_two)
    assert torch.equal(one.row_bytes(0), two.row_bytes(0))


@pytest.mark.parametrize("backend", ["torch", "native", "native, chunks on torch"])
def test_bf16_stays_near_float32(backend: str, make_tiny: Callable[..., Any], driver: Callable[..., Any]) -> None:
    """The speed mode is the same model: its logits are within bf16's rounding of the exact ones, by every chunking."""
    tiny = make_tiny(first_k_dense_replace=3)
    ids = prompt(3, 80)
    want = tiny.oracle_logits(ids)
    model = tiny.load(dtype="bfloat16", native_kernels=backend != "torch")
    model.chunks_on_torch = "chunks" in backend
    for chunk in (80, 9, 1):
        got = driver(model).run(0, ids, chunk)
        assert (got - want).norm() <= 0.06 * want.norm()
