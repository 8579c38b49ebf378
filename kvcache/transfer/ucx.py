"""Which wire UCX takes: told beforehand through its environment, asked afterwards through its log.

NIXL does not say which of UCX's transports carries a write. UCX prints its choice when a connection is set up
(UCX_PROTO_INFO): a table per kind of operation and memory, which is read back here. The log goes to a memory file and
not to stderr; what is not such a table is handed on to Python's logging.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.kvcache.transfer.base import LOCAL_TRANSPORTS, NO_NETWORK, TRANSPORTS, TransferSettings

_LOG = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None)

UNKNOWN = "unknown"
"""The log could not be had (UCX_LOG_FILE was set from outside) or says nothing of this connection."""

_TLS = {
    "cma": ("cma",),
    "shm": ("posix", "sysv"),
    "tcp": ("tcp",),
    "cuda_ipc": ("cuda_ipc", "cuda_copy"),
    "rdma": ("rc", "dc", "ud"),
}
_NAMES = {"cma": "cma", "posix": "shm", "sysv": "shm", "tcp": "tcp", "cuda_ipc": "cuda_ipc", "self": "self"}
_RDMA = ("rc_", "dc_", "ud_")
_STAGES = {"cuda_copy", "gdr_copy"}
"""Copies inside one host that a protocol may use besides the wire; not a wire."""

_LINE = re.compile(r"^\[[^\]]*\] \[[^\]]*\]\s+(?P<text>.*)$")
_SCOPE = re.compile(r"^\|\s*(?P<agent>\S+) (?P<scope>self|intra-node|inter-node) cfg#(?P<config>\d+)\s*\|$")
_PUT = re.compile(r"by ucp_put\S*(?: \S+)*? from (?P<source>\w+)\S*(?: memory)? to (?P<target>\w+)")
_RANGE = re.compile(r"^\|\s*\S+\.\.inf\s*\|[^|]*\|\s*(?P<wires>[^|]*?)\s*\|$")
_WIRE = re.compile(r"(\w+)/\S+")


def wire_environment(settings: TransferSettings) -> dict[str, str]:
    """UCX's variables for these settings. TCP, or without a network shared memory, stays possible for connection
    set-up; check the wire taken afterwards."""
    environment = {"UCX_PROTO_INFO": "y"}
    if settings.net_devices == NO_NETWORK:
        local = (settings.allowed_transports or TRANSPORTS) & LOCAL_TRANSPORTS | {"shm"}
        environment["UCX_TLS"] = ",".join(["self", *(name for wire in sorted(local) for name in _TLS[wire])])
        return environment
    if settings.net_devices != "all":
        environment["UCX_NET_DEVICES"] = settings.net_devices
    if settings.allowed_transports is not None:
        names = [name for wire in sorted(settings.allowed_transports | {"tcp"}) for name in _TLS[wire]]
        environment["UCX_TLS"] = ",".join(names)
    return environment


def backend_parameters(settings: TransferSettings) -> dict[str, str]:
    """NIXL's parameters of its UCX backend. UCX has a handler of a peer's death over TCP alone, and refuses to start
    when it is asked for one without; a write to a process that is gone fails in its post all the same (tested)."""
    return {"ucx_error_handling_mode": "none"} if settings.net_devices == NO_NETWORK else {}


_environment_lock = threading.Lock()


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables while UCX reads them, then put the old ones back, so that child processes do not inherit them."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class UcxLog:
    """UCX's log of this process, in memory. UCX opens it once, when its library is loaded."""

    def __init__(self) -> None:
        self._foreign = "UCX_LOG_FILE" in os.environ
        self._file = os.memfd_create("ucx-log")
        self._offset = 0
        self._rest = ""
        self._agent = ""
        self._wires: dict[tuple[str, str, str], str] = {}
        self._lock = threading.Lock()

    def environment(self) -> dict[str, str]:
        """To be set while the library is loaded. The path names this process, so that no child writes to its own."""
        return {} if self._foreign else {"UCX_LOG_FILE": f"/proc/{os.getpid()}/fd/{self._file}"}

    def wire(self, agent: str, source: str, target: str) -> str:
        """Transport of writes by the local ``agent`` between memory kinds (``cpu``, ``cuda``), newest connection first;
        UNKNOWN if the log does not say."""
        with self._lock:
            self._read()
            for (name, *kinds), wire in reversed(self._wires.items()):
                # UCX keeps the first 31 characters of the agent's name.
                if agent.startswith(name) and kinds == [_ucx_memory(source), _ucx_memory(target)]:
                    return wire
        return UNKNOWN

    def _read(self) -> None:
        _LIBC.fflush(None)
        while chunk := os.pread(self._file, 1 << 16, self._offset):
            self._offset += len(chunk)
            self._rest += chunk.decode("utf-8", "replace")
        *lines, self._rest = self._rest.split("\n")
        table: list[str] = []
        for line in lines:
            match = _LINE.match(line)
            text = match["text"] if match else line
            if text.startswith(("+", "|")):
                table.append(text)
                continue
            _LOG.info("ucx: %s", text)
        self._parse(table)

    def _parse(self, table: list[str]) -> None:
        agent, scope = "", ""
        put: re.Match[str] | None = None
        for text in table:
            if match := _SCOPE.match(text):
                agent, scope, put = match["agent"], match["scope"], None
            elif match := _PUT.search(text):
                put = match
            elif put is not None and scope != "self" and (match := _RANGE.match(text)):
                key = (agent, put["source"], put["target"])
                self._wires.pop(key, None)
                self._wires[key] = wire_name(match["wires"])


def wire_name(config: str) -> str:
    """``cma/memory`` → cma, ``rc_mlx5/mlx5_0:1`` → rdma; several wires in one protocol are joined by +."""
    found: list[str] = []
    for name in _WIRE.findall(config):
        if name in _STAGES:
            continue
        wire = "rdma" if name.startswith(_RDMA) else _NAMES.get(name, name)
        if wire not in found:
            found.append(wire)
    return "+".join(found) or UNKNOWN


def _ucx_memory(kind: str) -> str:
    return "host" if kind == "cpu" else kind
