"""The transfer engine's interface: register memory, shake hands, push rows, hear of terminal notices.

A *transfer* is named by its Handle (kvcache/handle.py): the right to write certain landing rows once. The sender
makes any number of *pushes* under it, one per finished chunk, and ends it with exactly one *terminal notice*: no write
of mine under this handle is on the wire, none will follow. Remote writes cannot be recalled (spec/protocol.md), so

- a push's deadline ends the *wait* (``PushDeadline``), never the rows: until ``Push.terminal`` is done the sender keeps
  the source rows pinned (L7) and the receiver keeps the landing rows quarantined (L6);
- a receiver reuses landing rows when the notice has come or the sender's process is known dead (``peers.py``); a notice
  that comes late is recognised by its transfer id.

Nothing here knows NIXL, protobuf or services. All methods are safe to call from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from headrace.kvcache.handle import ChecksumKind, Handle
from headrace.kvcache.transfer.copies import Copy, Direction, Span
from headrace.kvcache.transfer.pushes import Outcome, Push, Ready, RowMove, TerminalNotice
from headrace.kvcache.transfer.regions import MemoryRegion, RegionDescription


@dataclass(frozen=True)
class PeerDescription:
    """How to reach one rank's agent; twin of proto TransferAgent (services convert). Only landing regions are in it."""

    incarnation: str
    rank: int
    agent_name: str
    agent_metadata: bytes
    """Opaque: wire addresses, memory keys of the landing regions, identity of the process."""
    metadata_version: int
    """Rises whenever the landing regions change."""
    regions: tuple[RegionDescription, ...]
    layout_fingerprint: bytes | None
    """32 bytes; None for a process without KV (encoder)."""
    model_fingerprint: bytes
    checksums: tuple[ChecksumKind, ...] = (ChecksumKind.XXH3_64,)
    listener: str = ""
    """host:port at which rows are taken by stream; empty where they are not."""


@dataclass(frozen=True)
class TransferSettings:
    """Knobs of one process's transfer engine. The services' settings objects fill it; every value is checked here."""

    allowed_transports: frozenset[str] | None = None
    """Wires a push may take (``cma``, ``shm``, ``tcp``, ``cuda_ipc``, ``rdma``); None allows any."""
    net_devices: str = "lo"
    """UCX_NET_DEVICES: loopback unless the operator opens the service to other hosts; ``all`` for every device;
    ``none``: no network at all, not even a listener on loopback, which authenticates nobody and can write memory."""
    progress_thread: bool = True
    """Target side: UCX progresses in a thread of its own, as TCP puts need. It sleeps on file descriptors between
    events (progress_wait_s); with NIXL's default of 0 it would burn a whole core when idle (measured)."""
    progress_wait_s: float = 0.1
    """How long the progress thread sleeps at most when no event comes."""
    batch_bytes: int = 16 << 20
    """Bytes per wire request. CMA copies inside the post call, so this bounds how long other pushes wait."""
    window: int = 2
    """Wire requests of one push in flight at once."""
    gather: bool | None = None
    """Gather scattered rows into the staging region by one kernel. None: for device memory only (measured on H200:
    12.8 GB/s row by row, 341 GB/s staged)."""
    staging_bytes: int = 64 << 20
    """Staging memory per device, allocated at the first gathered push; at least window items."""
    push_timeout_s: float = 30.0
    """Deadline of a push whose caller names none (L6)."""
    max_pushes: int = 1024
    """Pushes not yet terminal; more are refused (L12)."""
    notice_poll_s: float = 0.005
    """How often the wire is asked for notices while one is expected (measured: 1 % of a core; every 1 ms takes 5 %).
    ``poll`` asks at once."""
    idle_poll_s: float = 0.05
    """The same while none is expected."""

    def __post_init__(self) -> None:
        if self.allowed_transports is not None:
            unknown = self.allowed_transports - TRANSPORTS
            if unknown or not self.allowed_transports:
                raise ValueError(
                    f"allowed_transports {sorted(self.allowed_transports)}: name one or more of {sorted(TRANSPORTS)}"
                )
        for name in ("progress_wait_s", "push_timeout_s", "notice_poll_s", "idle_poll_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        for name in ("batch_bytes", "window", "staging_bytes", "max_pushes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


TRANSPORTS = frozenset({"cma", "shm", "tcp", "cuda_ipc", "rdma"})
LOCAL_TRANSPORTS = frozenset({"cma", "shm", "cuda_ipc"})
"""Wires inside one host, whose kernel knows who is who."""
NO_NETWORK = "none"


@dataclass(frozen=True)
class TransferStats:
    """Sizes of live sets and totals since start, for metrics and the idle check (L11)."""

    pushes_posting: int
    pushes_in_flight: int
    pushes_abandoned: int
    """Past their deadline, not terminal: their source rows are still pinned."""
    pushes_done: int
    pushes_failed: int
    transfers_open: int
    """Handles pushed under and not ended."""
    bytes_sent: int
    notices_sent: int
    notices_received: int
    notices_undelivered: int
    """Terminal notices that could not be sent because the peer was lost; the owner tells it by RPC if it lives."""
    peers: int
    copies_open: int = 0
    """Not terminal: their memory is in use."""
    copies_done: int = 0
    copies_failed: int = 0
    bytes_copied: int = 0
    transports: Mapping[str, str] = field(default_factory=dict)
    """Per connected agent name: the wire in use."""

    @property
    def idle(self) -> bool:
        return not (
            self.pushes_posting
            or self.pushes_in_flight
            or self.pushes_abandoned
            or self.transfers_open
            or self.copies_open
        )


class TransferEngine(ABC):
    """One per process and rank. Whoever made it closes it."""

    @abstractmethod
    def register(self, region: MemoryRegion) -> None:
        """Make memory known to the wire. Landing regions raise the metadata version. Names are unique here."""

    @abstractmethod
    def deregister(self, name: str) -> None:
        """Take a region back; refused while a push or copy uses it. A peer's posted write may still land afterwards."""

    @abstractmethod
    def describe(self) -> PeerDescription:
        """What a peer needs to push here, or to read the host tier. A pool is not in it (L7: it is not writable)."""

    @abstractmethod
    def connect(self, peer: PeerDescription) -> Future[str]:
        """Shake hands; resolves to the transport in use. Idempotent for a description that is connected already.

        Raises (through the future) PeerRefused when fingerprints, transport or metadata do not fit, PeerLost when the
        peer does not answer.
        """

    @abstractmethod
    def wire_to(self, incarnation: str, rank: int = 0) -> str | None:
        """Transport between host memory here and at a connected peer; None while it is not connected or lost."""

    @abstractmethod
    def disconnect(self, incarnation: str) -> Future[None]:
        """L14: forget all agents of a dead or replaced incarnation and unmap their memory. Its pushes fail."""

    @abstractmethod
    def push(
        self,
        handle: Handle,
        moves: Sequence[RowMove],
        *,
        timeout_s: float | None = None,
        last: bool = False,
        ready: Ready | None = None,
    ) -> Push:
        """Write rows to the landing rows of ``handle``. ``last`` ends the transfer behind them (one message saved).

        The caller pins the source rows until ``terminal``. Their bytes are final when this is called, or, on a device,
        when ``ready`` says so: an event recorded behind the kernels that write them, so that no step waits.

        Raises:
            PushRefused: anything about handle or rows is not exact; nothing was posted.
            TransferBusy, EngineClosed.
        """

    @abstractmethod
    def end(self, handle: Handle, outcome: Outcome = Outcome.FAILED) -> Future[None]:
        """Say the last word of a transfer once its pushes are terminal; later pushes under it are refused. Idempotent.

        ``OK`` becomes ``FAILED`` in the notice if a push failed. Raises (through the future) PeerLost when the notice
        could not be delivered: tell the receiver by RPC.
        """

    @abstractmethod
    def cut(self, handle: Handle) -> None:
        """Post nothing more under this handle: pushes of which something is left fail with PushCut once what is posted
        is over. The last word is still to be said (``end``)."""

    @abstractmethod
    def copy(
        self,
        direction: Direction,
        incarnation: str,
        spans: Sequence[Span],
        *,
        region: str,
        rank: int = 0,
        timeout_s: float | None = None,
    ) -> Copy:
        """Read spans of a connected peer's READABLE region into the FETCHED region of this name here, or write them
        from the READABLE region of this name into the peer's FETCHED one. The memory it goes into is nobody else's
        until ``Copy.terminal``.

        Raises:
            CopyRefused: a region or span is not exact; nothing was posted.
            PeerLost, TransferBusy, EngineClosed.
        """

    def grant(self, handle: Handle, sender: str | None) -> None:
        """The receiver granted this transfer, to the incarnation ``sender`` where that is known: expect its notice, and
        let in what comes under it by stream, if this engine takes streams."""
        self.expect(handle.transfer_id)

    def sender_died(self, incarnation: str) -> None:  # noqa: B027 - an engine without streams has nothing to close
        """On evidence. To be called before its landing rows are freed: no stream of it is taken any more."""

    @abstractmethod
    def expect(self, transfer_id: str) -> None:
        """The receiver granted this transfer: poll for its notice closely until it comes or ``forget`` is called."""

    @abstractmethod
    def forget(self, transfer_id: str) -> None:
        """Nobody waits for it here any more: poll less closely, and close its stream. A notice that still comes is
        delivered all the same (late, recognised by its id)."""

    @abstractmethod
    def poll(self) -> None:
        """Ask the wire for notices now, on the transfer thread; returns at once. For the moment when the sender's RPC
        (Commit) says that its notice is behind it."""

    @abstractmethod
    def take_notices(self) -> list[TerminalNotice]:
        """Notices received since the last call, in order of arrival."""

    @abstractmethod
    def on_notice(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` on the transfer thread after notices arrived; keep it short."""

    @abstractmethod
    def stats(self) -> TransferStats: ...

    @abstractmethod
    def close(self, timeout_s: float = 5.0) -> None:
        """Fail queued pushes, wait for posted ones, release everything, join the thread. Idempotent."""
