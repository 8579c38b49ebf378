"""Which backend moves and sums rows of bytes on a device; decided when a device is first used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from headrace.kernels.available import has_triton
from headrace.kernels.reference import rows as reference

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowOps:
    """Signatures and meaning: kernels/reference/rows.py."""

    backend: str
    checksum: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    copy_checksummed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@cache
def row_ops(device_type: str) -> RowOps:
    """Triton where it is installed, else the reference."""
    if has_triton(device_type):
        from headrace.kernels.triton import rows as triton_rows

        ops = RowOps("triton", triton_rows.checksum_rows, triton_rows.copy_rows_checksummed)
    else:
        ops = RowOps("reference", reference.checksum_rows, reference.copy_rows_checksummed)
    _LOG.info("rows on %s: %s", device_type, ops.backend)
    return ops
