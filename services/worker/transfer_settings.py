"""The transfer engine's settings as a section of a worker's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field

from headrace.kvcache.transfer.base import TransferSettings
from headrace.services.runtime.settings import Section

Transport = Literal["cma", "shm", "tcp", "cuda_ipc", "rdma"]


class TransferSection(Section):
    """How rows move between processes (NIXL over UCX)."""

    allowed_transports: tuple[Transport, ...] | None = None
    """Wires that a push may take; a peer that would use another one is refused. Default: any."""
    net_devices: str = "lo"
    """Network devices of UCX: `lo`, a list of names, or `all`."""
    push_timeout_seconds: float = Field(default=30.0, gt=0)
    """Deadline of a push whose request names none (L6)."""
    staging_bytes: ByteSize = Field(default=ByteSize(64 * 1024 * 1024), ge=1024 * 1024)
    """Staging memory per device, where rows are gathered before they are sent (GPUs)."""

    def engine_settings(self) -> TransferSettings:
        """As kvcache.transfer wants them."""
        return TransferSettings(
            allowed_transports=None if self.allowed_transports is None else frozenset(self.allowed_transports),
            net_devices=self.net_devices,
            push_timeout_s=self.push_timeout_seconds,
            staging_bytes=int(self.staging_bytes),
        )
