"""L1, L2: model_fp changes with every byte that shapes a result, and with nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.engine import fingerprint
from headrace.engine.fingerprint import model_fingerprint, weight_digests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"hidden_size": 4, "vocab_size": 8}')
    (made / "a.safetensors").write_bytes(b"one")
    (made / "b.safetensors").write_bytes(b"two")
    return made


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests.json"


def test_what_shapes_results_is_covered(folder: Path, cache: Path) -> None:
    """Contents, names, config and numeric mode each change it; the order of config keys and other files do not."""
    base = model_fingerprint(folder, "noquant/float32", cache)
    assert len(base) == 32
    assert model_fingerprint(folder, "noquant/bfloat16", cache) != base
    (folder / "README.md").write_text("notes")
    (folder / "config.json").write_text('{"vocab_size": 8, "hidden_size": 4}')
    assert model_fingerprint(folder, "noquant/float32", cache) == base
    (folder / "config.json").write_text('{"vocab_size": 9, "hidden_size": 4}')
    assert model_fingerprint(folder, "noquant/float32", cache) != base
    (folder / "config.json").write_text('{"vocab_size": 8, "hidden_size": 4}')
    (folder / "b.safetensors").write_bytes(b"too")
    assert model_fingerprint(folder, "noquant/float32", cache) != base
    (folder / "b.safetensors").write_bytes(b"two")
    assert model_fingerprint(folder, "noquant/float32", cache) == base
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    assert model_fingerprint(folder, "noquant/float32", cache) != base


def test_contents_are_read_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache saves the hash, and only while inode, size and mtime stay."""
    read: list[str] = []
    original = fingerprint._sha256

    def counting(path: Path) -> str:
        read.append(path.name)
        return original(path)

    monkeypatch.setattr(fingerprint, "_sha256", counting)
    first = weight_digests(folder, cache)
    assert weight_digests(folder, cache) == first
    assert read == ["a.safetensors", "b.safetensors"]
    os.utime(folder / "a.safetensors", ns=(1, 1))
    assert weight_digests(folder, cache) == first
    assert read[2:] == ["a.safetensors"]


def test_a_broken_cache_costs_time_only(folder: Path, cache: Path) -> None:
    good = weight_digests(folder, cache)
    for broken in ("{", "[]", json.dumps(dict.fromkeys(json.loads(cache.read_text()), "short"))):
        cache.write_text(broken)
        assert weight_digests(folder, cache) == good


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        model_fingerprint(tmp_path, "noquant/float32", tmp_path / "digests.json")
