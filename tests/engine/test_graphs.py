"""Captures and the garbage that old engines leave."""

from __future__ import annotations

import gc

import pytest
import torch

from headrace.engine.graphs import no_collection


def test_nothing_is_collected_during_a_capture() -> None:
    """And collection is as it was afterwards, however the capture ended."""
    assert gc.isenabled()
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            pass
        assert not gc.isenabled(), "the outer one goes on"
    assert gc.isenabled()
    with pytest.raises(RuntimeError), no_collection():
        raise RuntimeError
    assert gc.isenabled()


class Holder:
    """An old engine: a cycle with a graph in it."""

    def __init__(self) -> None:
        self.me = self
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = torch.ones(8, device="cuda") + 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_in_the_garbage_leave_a_capture_alone() -> None:
    """L13: a worker that changes its role leaves its old graphs to the collector."""
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(1)  # collects at nearly every allocation
        gc.disable()
        Holder()
        gc.enable()
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made = [[index] for index in range(1000)]
            out = torch.ones(8, device="cuda") * len(made)
        graph.replay()
        assert out.tolist() == [1000.0] * 8
    finally:
        gc.set_threshold(*thresholds)
