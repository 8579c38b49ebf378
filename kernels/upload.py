"""Host numbers to a device without the host waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def upload(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``values`` as a one-dimensional tensor on ``device``.

    A copy from pageable memory would make the host wait until the device has done all that is queued before it; from
    page-locked memory it is queued like a kernel. torch keeps that memory until the copy has run.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def upload_array(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The same for an array."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
