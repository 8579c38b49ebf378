"""Writing a model folder so that it exists whole or not at all, and only one process writes at a time."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

PARTIAL_PREFIX = ".partial-"
"""Folders being written; left ones are removed under the lock."""
_ALIGN = 64
"""Tensor data starts on a cache line."""
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}

Advance = Callable[[int], None]
"""Called with the number of bytes just written."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that is made when its turn to be written comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; another process waits. Released by the kernel when the holder dies."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in directory.glob(f"{PARTIAL_PREFIX}*"):
            shutil.rmtree(left)
        yield


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; on success it is synced to disk and takes the place of ``target``, on an exception it is gone.

    Call inside :func:`exclusive` of the parent.
    """
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=PARTIAL_PREFIX))
    try:
        yield partial
        for path in partial.iterdir():
            _sync(path)
        _sync(partial)
        partial.chmod(0o755)
        if target.exists():
            retired = Path(tempfile.mkdtemp(dir=target.parent, prefix=PARTIAL_PREFIX))
            target.rename(retired / target.name)
            partial.rename(target)
            shutil.rmtree(retired)
        else:
            partial.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_safetensors(path: Path, tensors: Sequence[PlannedTensor], advance: Advance) -> None:
    """Write tensors in the given order, one behind the other (engine/weights.py joins neighbours as views).

    Memory: one tensor at a time.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % _ALIGN)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            data = tensor.make().to(tensor.dtype).contiguous()
            if tuple(data.shape) != tensor.shape:
                raise ValueError(f"{tensor.name} came out as {list(data.shape)}, planned was {list(tensor.shape)}")
            file.write(data.flatten().view(torch.uint8).numpy().data)
            advance(tensor.nbytes)


def write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
