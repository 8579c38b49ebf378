"""Memory-mapped weights: views where they can be, refusals where the files are not what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.engine.converters.folder import PlannedTensor, write_safetensors
from headrace.engine.loading import ModelError
from headrace.engine.weights import Weights


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """In the given order, one behind the other."""
    plan = [PlannedTensor(name, tuple(t.shape), t.dtype, lambda t=t: t) for name, t in tensors.items()]
    write_safetensors(path, plan, lambda amount: None)


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    """Our reader and theirs agree on every dtype we use."""
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.randint(0, 9, (2, 2)),
        "d": torch.randn(4, 32).to(torch.float8_e4m3fn),
        "e": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    weights = Weights(tmp_path)
    assert sorted(weights.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        assert weights.dtype(name) == tensor.dtype
        assert torch.equal(weights.get(name, shape=tensor.shape).view(torch.uint8), tensor.view(torch.uint8))


def test_neighbours_join_without_a_copy(tmp_path: Path) -> None:
    """Parts in file order are one view of the map; in another order they are copied, and equal all the same."""
    parts = {f"expert.{index}": torch.randn(4, 6) for index in range(3)}
    write(tmp_path / "model.safetensors", parts)
    weights = Weights(tmp_path)
    stacked = weights.stack(list(parts))
    assert torch.equal(stacked, torch.stack(list(parts.values())))
    assert stacked.data_ptr() == weights.get("expert.0").data_ptr()
    backwards = weights.stack(list(reversed(parts)))
    assert torch.equal(backwards, torch.stack(list(reversed(parts.values()))))
    assert backwards.data_ptr() != weights.get("expert.2").data_ptr()


def test_maps_are_shared_until_written(tmp_path: Path) -> None:
    """Writing to a tensor (nobody should) changes neither the file nor another process's view."""
    write(tmp_path / "model.safetensors", {"a": torch.ones(4)})
    first, second = Weights(tmp_path), Weights(tmp_path)
    first.get("a").zero_()
    assert torch.equal(second.get("a"), torch.ones(4))
    assert torch.equal(Weights(tmp_path).get("a"), torch.ones(4))


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors", {"a": torch.ones(2)})
    write(tmp_path / "model-2.safetensors", {"b": torch.zeros(2)})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Weights(tmp_path).names() == ["a", "b"]


def test_what_is_not_right_is_refused(tmp_path: Path) -> None:
    """A missing tensor, another shape, a cut file, a file outside the folder: typed errors that name the thing."""
    file = tmp_path / "model.safetensors"
    with pytest.raises(ModelError, match="missing or empty"):
        Weights(tmp_path)
    write(file, {"a": torch.ones(4, 4)})
    weights = Weights(tmp_path)
    with pytest.raises(ModelError, match="no tensor b"):
        weights.get("b")
    with pytest.raises(ModelError, match=r"shape \[4, 4\]"):
        weights.get("a", shape=(4, 5))
    whole = file.read_bytes()
    for length in (4, 20, len(whole) - 1):
        cut = tmp_path / f"cut{length}"
        cut.mkdir()
        (cut / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut short|broken"):
            Weights(cut)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ModelError, match="outside"):
        Weights(tmp_path)
