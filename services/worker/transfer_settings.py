"""The transfer engine's settings as a section of a worker's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field

from headrace.kvcache.transfer.base import LOCAL_TRANSPORTS, NO_NETWORK, TransferSettings
from headrace.services.runtime.settings import Section
from headrace.services.runtime.settings_load import SettingsError
from headrace.services.worker.signing import UNSIGNED, Signer

Transport = Literal["cma", "shm", "tcp", "cuda_ipc", "rdma"]


class TransferSection(Section):
    """How rows move between processes: NIXL over UCX, or a stream to the receiver's own port."""

    transport: Literal["auto", "nixl", "stream"] = "auto"
    """`auto`: NIXL wherever UCX may reach the peer, and else, with TLS on and no `trusted_network`, a stream under the
    peer's certificate, which is slower. `nixl`: such a peer is refused. `stream`: always by stream; for trying it."""
    allowed_transports: tuple[Transport, ...] | None = None
    """Wires of UCX that a push may take; a peer that would use another one is refused. Default: any."""
    net_devices: str = "lo"
    """Network devices of UCX without TLS: `lo`, a list of names, or `all`."""
    trusted_network: str | None = None
    """Network devices of UCX where TLS is on (`eth1`, `mlx5_0:1`, a list). UCX authenticates nobody: whoever reaches
    its listener there can write this process's memory, so name only a network whose every machine is trusted. Default:
    none: UCX opens no listener and moves rows inside one host alone; to other hosts they go by stream."""
    push_timeout_seconds: float = Field(default=30.0, gt=0)
    """Deadline of a push whose request names none (L6)."""
    secret_file: Path | None = None
    """File with the secret by which the workers of a cluster sign transfer handles, agents and embedding handles: 32
    characters or more, the same on all of them, readable by this user alone. Of several lines the first signs and all
    are believed, so that a secret can be exchanged while all run. Needed where TLS is on; without it nothing is signed.
    Clocks of two hosts may differ by a minute."""
    staging_bytes: ByteSize = Field(default=ByteSize(64 * 1024 * 1024), ge=1024 * 1024)
    """Staging memory per device, where rows are gathered before they are sent (GPUs)."""

    def signer(self, *, tls: bool) -> Signer:
        """Signs and checks what passes between workers. Raises SettingsError."""
        if self.secret_file is None:
            if tls:
                raise SettingsError("transfer.secret_file is needed with TLS: openssl rand -hex 32 makes a secret")
            return UNSIGNED
        return Signer(file=self.secret_file)

    def engine_settings(self, *, tls: bool) -> TransferSettings:
        """As kvcache.transfer wants them. Raises SettingsError for wires that TLS forbids."""
        allowed = None if self.allowed_transports is None else frozenset(self.allowed_transports)
        devices = self.net_devices
        if tls:
            devices = self.trusted_network or NO_NETWORK
        if devices == NO_NETWORK and allowed is not None and not allowed <= LOCAL_TRANSPORTS:
            wires = ", ".join(sorted(allowed - LOCAL_TRANSPORTS))
            raise SettingsError(
                f"transfer.allowed_transports names {wires}, which authenticates nobody: with TLS on, name the network "
                "whose machines are trusted (transfer.trusted_network)"
            )
        return TransferSettings(
            allowed_transports=allowed,
            net_devices=devices,
            push_timeout_s=self.push_timeout_seconds,
            staging_bytes=int(self.staging_bytes),
        )
