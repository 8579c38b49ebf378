"""Marks on a device's stream: what another thread waits for before it reads what kernels write."""

from __future__ import annotations

import torch


def stream_mark(device: torch.device) -> torch.cuda.Event | None:
    """Stands behind all kernels queued so far on the current stream; None on the CPU, where nothing is queued."""
    if device.type != "cuda":
        return None
    mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record(torch.cuda.current_stream(device))
    return mark
