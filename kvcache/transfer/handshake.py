"""Getting to know a peer: load its keys, write one probe page per pair of memories, learn which wire UCX takes."""

from __future__ import annotations

from concurrent.futures import Future

from headrace.kvcache.transfer.agent import Memory, WireAgent, WireRequest
from headrace.kvcache.transfer.base import PeerDescription, TransferSettings
from headrace.kvcache.transfer.errors import PeerLost, PeerRefused, Refusal, TransferError
from headrace.kvcache.transfer.peers import Peer
from headrace.kvcache.transfer.pieces import item_addresses, merge
from headrace.kvcache.transfer.ucx import UNKNOWN
from headrace.kvcache.transfer.wire import Envelope

PROBE_BYTES = 4096


class Handshake:
    """In progress on the transfer thread until ``done`` has a result. Connecting over TCP takes some 20 ms."""

    def __init__(self, description: PeerDescription, envelope: Envelope, deadline: float) -> None:
        self.description = description
        self.envelope = envelope
        self.done: Future[str] = Future()
        self.done.set_running_or_notify_cancel()
        self.peer: Peer | None = None
        """Set when it succeeded."""
        self._deadline = deadline
        self._pending: list[tuple[tuple[str, str], WireRequest]] = []
        self._pairs: list[tuple[str, str]] = []

    def start(self, agent: WireAgent, probes: dict[str, tuple[int, int]]) -> None:
        """Load the peer's keys and post the probes from this process's pages (memory → address, device id).

        Raises:
            PeerLost, WireFailed.
        """
        name = self.description.agent_name
        agent.load(name, self.envelope.connection)
        for here, (own_address, own_device) in probes.items():
            for there, address, device in self.envelope.probes:
                pieces = merge(
                    item_addresses(own_address, PROBE_BYTES, (0,)),
                    item_addresses(address, PROBE_BYTES, (0,)),
                    PROBE_BYTES,
                )
                request, complete = agent.post(name, pieces, Memory(here, own_device), Memory(there, device), b"")
                self._pairs.append((here, there))
                if complete:
                    agent.release(request)
                else:
                    self._pending.append(((here, there), request))

    def step(self, agent: WireAgent, settings: TransferSettings, now: float) -> bool:
        """True when finished: ``peer`` is set, or the error is raised.

        Raises:
            PeerRefused: the wire taken is not allowed. PeerLost: the peer does not answer. WireFailed.
        """
        for entry in tuple(self._pending):
            if agent.is_complete(entry[1]):
                self._pending.remove(entry)
                agent.release(entry[1])
        if self._pending:
            if now < self._deadline:
                return False
            raise PeerLost(self.description.incarnation, "it does not answer the handshake")
        wires = {pair: agent.wire(*pair) for pair in self._pairs}
        allowed = settings.allowed_transports
        if allowed is not None:
            for pair, wire in wires.items():
                if wire == UNKNOWN or not set(wire.split("+")) <= allowed:
                    raise PeerRefused(
                        Refusal.TRANSPORT,
                        f"writes from {pair[0]} to {pair[1]} memory would go over {wire}, allowed are "
                        f"{', '.join(sorted(allowed))}; allow it or fix the devices (UCX_NET_DEVICES)",
                    )
        self.peer = Peer(self.description, self.envelope.process, self.envelope.versions, wires)
        return True

    def abandon(self, agent: WireAgent) -> None:
        """After a failure: forget the peer. Its probe page may still be written, which harms nothing."""
        agent.unload(self.description.agent_name)
        for _, request in self._pending:
            try:
                agent.release(request)
            except TransferError:
                continue
