"""Weights of a Hugging Face folder as tensors over memory maps.

The maps are private and copy-on-write but never written, so all processes of a host share the page cache and a loaded
model costs address space, not memory. Fused tensors (q and kv_a of a layer, gate and up, the experts of a layer) come
out as *views* where the file stores their parts one behind the other; any other order costs one private copy. Our
converters write in that order (engine/converters); the folder stays a plain Hugging Face folder.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from headrace.engine.loading import ModelError

_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class _Entry:
    file: int
    """Index into the folder's maps."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte inside the file."""
    nbytes: int


class Weights:
    """All tensors of a folder by name. Keeps the maps alive as long as any tensor over them lives."""

    def __init__(self, folder: Path, device: torch.device | None = None) -> None:
        """Map every safetensors file that the index names, or model.safetensors when there is no index.

        ``device``: where tensors are handed out; anything but the CPU is a copy.

        Raises:
            ModelError: a file is missing, cut short or no safetensors file.
        """
        self.folder = folder
        self.device = device or torch.device("cpu")
        self._bytes: list[torch.Tensor] = []
        self._entries: dict[str, _Entry] = {}
        for name in _files(folder):
            self._map(folder / name)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).dtype

    def get(self, name: str, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        """One tensor; a view over the map unless ``dtype`` or the device differs from the stored one.

        Raises:
            ModelError: there is no such tensor, or its shape is not ``shape``.
        """
        entry = self._entry(name)
        if shape is not None and entry.shape != tuple(shape):
            raise ModelError(f"{name} has shape {list(entry.shape)}, config.json asks for {list(shape)}")
        tensor = self._view(entry, entry.shape)
        return tensor.to(self.device, dtype)

    def cat(self, names: Sequence[str], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Tensors joined along dimension 0; a view where they lie one behind the other with equal trailing shapes."""
        entries = [self._entry(name) for name in names]
        trailing = entries[0].shape[1:]
        if any(entry.shape[1:] != trailing for entry in entries):
            raise ModelError(f"cannot join {list(names)}: their trailing dimensions differ")
        if self._adjacent(entries):
            joined = self._view(entries[0], (sum(entry.shape[0] for entry in entries), *trailing))
            return joined.to(self.device, dtype)
        parts = [self.get(name, dtype) for name in names]
        return torch.cat(parts)

    def stack(self, names: Sequence[str], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Equal shapes joined along a new dimension 0; a view where they lie one behind the other."""
        shape = self._entry(names[0]).shape
        if any(self._entry(name).shape != shape for name in names):
            raise ModelError(f"cannot stack {names[0]} … {names[-1]}: their shapes differ")
        return self.cat(names, dtype).view(len(names), *shape)

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise ModelError(f"{self.folder} has no tensor {name}") from None

    def _view(self, entry: _Entry, shape: tuple[int, ...]) -> torch.Tensor:
        nbytes = entry.dtype.itemsize
        for size in shape:
            nbytes *= size
        raw = self._bytes[entry.file][entry.start : entry.start + nbytes]
        if entry.start % entry.dtype.itemsize:
            raw = raw.clone()
        return raw.view(entry.dtype).view(shape)

    @staticmethod
    def _adjacent(entries: Sequence[_Entry]) -> bool:
        return all(
            after.file == before.file and after.dtype == before.dtype and after.start == before.start + before.nbytes
            for before, after in pairwise(entries)
        )

    def _map(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (FileNotFoundError, ValueError):
            raise ModelError(f"{path} is missing or empty; fetch or convert the model again") from None
        if len(mapped) < 8:
            raise ModelError(f"{path} is cut short; fetch or convert the model again")
        (header_bytes,) = struct.unpack_from("<Q", mapped)
        data = 8 + header_bytes
        if header_bytes > _MAX_HEADER_BYTES or data > len(mapped):
            raise ModelError(f"{path} is no safetensors file or is cut short")
        try:
            header = json.loads(mapped[8:data])
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} has a broken safetensors header: {error}") from error
        file_index = len(self._bytes)
        self._bytes.append(torch.frombuffer(mapped, dtype=torch.uint8))
        for name, fields in header.items():
            if name == "__metadata__":
                continue
            start, end = fields["data_offsets"]
            if data + end > len(mapped) or start > end:
                raise ModelError(f"{path} is cut short: {name} ends beyond the file; fetch or convert the model again")
            if fields["dtype"] not in _DTYPES:
                raise ModelError(f"{path}: {name} has the unknown dtype {fields['dtype']}")
            entry = _Entry(file_index, _DTYPES[fields["dtype"]], tuple(fields["shape"]), data + start, end - start)
            if name in self._entries:
                raise ModelError(f"{path}: {name} stands in two files of the folder")
            self._entries[name] = entry


def _files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (json.JSONDecodeError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} is no safetensors index: {error}") from error
    if any(Path(name).name != name for name in names):
        raise ModelError(f"{index} names a file outside the folder")
    return sorted(names)
