"""The NIXL binding behind a few typed calls; nothing else imports it. One thread uses an agent.

``nixl_cu12`` (machines without CUDA, and CUDA 12) or ``nixl_cu13``, whichever is installed: a ``--no-deps`` install
lacks the meta package ``nixl``. The low-level binding is used because the high-level class fixes the progress thread's
sleep to 0, which burns a core in every idle process.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from headrace.kvcache.transfer.base import TransferSettings
from headrace.kvcache.transfer.errors import PeerLost, TransferError, WireFailed
from headrace.kvcache.transfer.pieces import Addresses, Pieces
from headrace.kvcache.transfer.ucx import UcxLog, backend_parameters, environment, wire_environment

BINDINGS = ("nixl_cu12", "nixl_cu13")
_load_lock = threading.Lock()
_loaded: tuple[ModuleType, UcxLog] | None = None


class NixlMissing(TransferError):
    """No NIXL wheel: ``pip install --no-deps nixl-cu12==1.5.1`` (CUDA 13 machines: nixl-cu13)."""


def load_binding() -> tuple[ModuleType, UcxLog]:
    """The binding's module and UCX's log; loaded once per process. Raises NixlMissing."""
    global _loaded
    with _load_lock:
        if _loaded is None:
            log = UcxLog()
            # NIXL logs each refusal that it also raises; the raised one is handled, so only the fatal ones print.
            quiet = {} if "NIXL_LOG_LEVEL" in os.environ else {"NIXL_LOG_LEVEL": "FATAL"}
            with environment(log.environment() | quiet):
                _loaded = (_import_binding(), log)
        return _loaded


def _import_binding() -> ModuleType:
    for name in BINDINGS:
        try:
            module = importlib.import_module(f"{name}._bindings")
        except ModuleNotFoundError:
            continue
        # Loading the UCX plugin now makes UCX read its log's place while the variable is set.
        config = module.nixlAgentConfig()
        config.useProgThread = False
        module.nixlAgent("headrace-loader", config).getPluginParams("UCX")
        return module
    raise NixlMissing(f"none of {', '.join(BINDINGS)} is installed: pip install --no-deps nixl-cu12==1.5.1")


@dataclass(eq=False)
class Registration:
    """Memory known to the wire."""

    descriptors: Any
    """nixlRegDList."""


@dataclass(eq=False)
class WireRequest:
    """A posted write or read. Release it once it is complete."""

    native: int
    peer: str


class WireAgent:
    """One NIXL agent with its UCX backend."""

    def __init__(self, name: str, settings: TransferSettings) -> None:
        nixl, self._log = load_binding()
        self._nixl = nixl
        self.name = name
        config = nixl.nixlAgentConfig()
        config.useProgThread = settings.progress_thread
        config.pthrDelay = int(settings.progress_wait_s * 1e6)
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        with environment(wire_environment(settings)):
            self._agent = nixl.nixlAgent(name, config)
            self._backend = self._agent.createBackend("UCX", backend_parameters(settings))

    def register(self, tensor: torch.Tensor) -> Registration:
        descriptors = self._nixl.nixlRegDList(
            self._segment(tensor.device.type),
            [(tensor.data_ptr(), tensor.numel() * tensor.element_size(), device_index(tensor), "")],
        )
        self._agent.registerMem(descriptors, [self._backend])
        return Registration(descriptors)

    def deregister(self, registration: Registration) -> None:
        self._agent.deregisterMem(registration.descriptors, [self._backend])

    def metadata(self, registrations: Sequence[Registration]) -> bytes:
        """Address of this agent and memory keys of exactly these registrations, at least one."""
        parts = [
            bytes(self._agent.getLocalPartialMD(registration.descriptors, True, [self._backend]))
            for registration in registrations
        ]
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)

    def load(self, name: str, metadata: bytes) -> None:
        """Know a peer. Raises WireFailed when the metadata is unreadable or names another agent."""
        offset = 0
        while offset < len(metadata):
            length = int.from_bytes(metadata[offset : offset + 4], "little")
            part = metadata[offset + 4 : offset + 4 + length]
            offset += 4 + length
            try:
                loaded = self._agent.loadRemoteMD(part)
            except Exception as error:
                raise WireFailed(f"metadata of {name} cannot be loaded ({error}); ask for it again") from error
            if loaded.decode() != name:
                raise WireFailed(f"metadata of {loaded!r} where {name} was expected; ask for it again")

    def unload(self, name: str) -> None:
        """Forget a peer: close the connection, unmap its memory (L14). Unknown names are not an error."""
        try:
            self._agent.invalidateRemoteMD(name)
        except self._nixl.nixlNotFoundError:
            return

    def post(
        self,
        peer: str,
        pieces: Pieces,
        source: Memory,
        target: Memory,
        notice: bytes,
        *,
        reads: bool = False,
    ) -> tuple[WireRequest, bool]:
        """Start a write of ``source`` here to ``target`` there, or a read of ``target`` into ``source``; (request,
        complete already). ``notice`` reaches the peer behind the last byte.

        Raises:
            PeerLost, WireFailed: nothing of this request is on the wire.
        """
        local = self._list(source, pieces.source, pieces.length)
        remote = self._list(target, pieces.target, pieces.length)
        operation = self._nixl.NIXL_READ if reads else self._nixl.NIXL_WRITE
        try:
            native = self._agent.createXferReq(operation, local, remote, peer, notice, [self._backend])
        except Exception as error:
            raise self._typed(error, peer) from error
        request = WireRequest(native, peer)
        try:
            status = self._agent.postXferReq(native, notice)
        except Exception as error:
            self.release(request)
            raise self._typed(error, peer) from error
        return request, status == self._nixl.NIXL_SUCCESS

    def is_complete(self, request: WireRequest) -> bool:
        """Progress the wire and ask. Raises PeerLost or WireFailed when the request ended badly; it is terminal."""
        try:
            return bool(self._agent.getXferStatus(request.native) == self._nixl.NIXL_SUCCESS)
        except Exception as error:
            raise self._typed(error, request.peer) from error

    def release(self, request: WireRequest) -> None:
        """Give a request's memory back. Raises WireFailed when it is on the wire and cannot be cancelled."""
        try:
            self._agent.releaseXferReq(request.native)
        except Exception as error:
            raise self._typed(error, request.peer) from error

    def notify(self, peer: str, message: bytes) -> None:
        """Raises PeerLost or WireFailed."""
        try:
            self._agent.genNotif(peer, message, [self._backend])
        except Exception as error:
            raise self._typed(error, peer) from error

    def notices(self) -> list[tuple[str, bytes]]:
        """(sender, message) of everything that came since the last call."""
        found = self._agent.getNotifs({}, [self._backend])
        return [(sender, bytes(message)) for sender, messages in found.items() for message in messages]

    def wire(self, source: str, target: str) -> str:
        """Transport that the newest connection takes between two kinds of memory."""
        return self._log.wire(self.name, source, target)

    def _list(self, memory: Memory, addresses: Addresses, lengths: Addresses) -> Any:
        table = np.empty((len(addresses), 3), dtype=np.uint64)
        table[:, 0] = addresses
        table[:, 1] = lengths
        table[:, 2] = memory.device_id
        return self._nixl.nixlXferDList(self._segment(memory.kind), table)

    def _segment(self, kind: str) -> Any:
        return self._nixl.DRAM_SEG if kind == "cpu" else self._nixl.VRAM_SEG

    def _typed(self, error: Exception, peer: str) -> TransferError:
        if isinstance(error, self._nixl.nixlRemoteDisconnectError | self._nixl.nixlCancelledError):
            return PeerLost(peer, str(error))
        return WireFailed(f"transfer with {peer}: {error or type(error).__name__}; push again under a new handle")


@dataclass(frozen=True)
class Memory:
    """Where descriptors of one side lie."""

    kind: str
    """``cpu``, ``cuda`` …"""
    device_id: int


def device_index(tensor: torch.Tensor) -> int:
    """0 for host memory."""
    return 0 if tensor.device.type == "cpu" else tensor.get_device()
