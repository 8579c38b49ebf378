"""Stored tensors of a V4.1 folder by name, checked against the config's shapes and the format's dtypes (spec §2).

Names may carry a leading ``model.`` in the file; here they never do. Tensors are views over the memory map.
"""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.engine.loading import ModelError
from headrace.engine.weights import Weights


class Checkpoint:
    """Read access to one folder."""

    def __init__(self, folder: Path) -> None:
        """Map the folder's files.

        Raises:
            ModelError: no readable safetensors files, a name present twice, or tensors of another model.
        """
        self.folder = folder
        self._weights = Weights(folder)
        self._stored: dict[str, str] = {}
        for name in self._weights.names():
            bare = name.removeprefix("model.")
            if bare in self._stored:
                raise ModelError(f"{folder}: both {bare} and model.{bare} are present; keep one")
            self._stored[bare] = name
        foreign = sorted(n for n in self._stored if n.rpartition(".")[2].startswith("hc_") and "norm" in n)
        if foreign:
            raise ModelError(f"{folder}: {foreign[0]}: separate hyper-connection norms belong to another model")

    def has(self, name: str) -> bool:
        return name in self._stored

    def tensor(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> torch.Tensor:
        """The stored tensor. Raises ModelError unless its shape and one of the dtypes agree."""
        value = self._weights.get(self._stored.get(name, name), shape=shape)
        if value.dtype not in dtypes:
            raise ModelError(f"{name} is {value.dtype}, this family stores {' or '.join(str(d) for d in dtypes)}")
        return value

    def bf16(self, name: str, *shape: int) -> torch.Tensor:
        return self.tensor(name, shape, torch.bfloat16)

    def f32(self, name: str, *shape: int) -> torch.Tensor:
        return self.tensor(name, shape, torch.float32)

    def fp8(self, name: str, rows: int, columns: int, row_block: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
        """``name.weight`` e4m3 [rows, columns] and ``name.scale`` e8m0 [⌈rows/row_block⌉, ⌈columns/32⌉]."""
        weight = self.tensor(f"{name}.weight", (rows, columns), torch.float8_e4m3fn)
        scale = (-(-rows // row_block), -(-columns // 32))
        return weight, self.tensor(f"{name}.scale", scale, torch.float8_e8m0fnu)

    def fp4(self, name: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``name.weight`` I8 [rows, columns/2], low nibble = even channel; ``name.scale`` e8m0 [rows, columns/32]."""
        weight = self.tensor(f"{name}.weight", (rows, columns // 2), torch.int8, torch.uint8)
        return weight, self.tensor(f"{name}.scale", (rows, columns // 32), torch.float8_e8m0fnu)
