"""The reader's side: which peers there are, calls to them, and fetches over the transfer engine.

Over every wire but TCP the reader reads by itself. Reading over TCP takes up to three times as long as writing
(bench/copies.py), so there the lessor writes into this process's buffer; such a fetch is over when the lessor says so
or is known to be dead, and until then its part of the buffer is nobody's (L7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from headrace.kvcache.host.peers import Arrival, Fetching, Granted, PeerUnreachable
from headrace.kvcache.keys import Key
from headrace.kvcache.last_keys import LastKeys
from headrace.kvcache.transfer.base import PeerDescription, TransferEngine
from headrace.kvcache.transfer.copies import Direction, Span
from headrace.kvcache.transfer.errors import TransferError
from headrace.kvcache.transfer.regions import RegionRole
from headrace.services.runtime import logs
from headrace.services.runtime.errors import InvalidArgument, PermissionDenied
from headrace.services.runtime.ids import short
from headrace.services.runtime.registry.base import Registry, Removed, Replica, Role, State
from headrace.services.worker.channels import Channels
from headrace.services.worker.signing import Signer
from headrace.services.worker.tier.peer_messages import leased_from_wire
from headrace.services.worker.transfer_wire import agent_from_wire, agent_to_wire
from headrace.v1 import cache_pb2, cache_pb2_grpc, common_pb2

FETCHED = "fetched entries"
"""Name under which the buffer is registered."""
RELEASE_TIMEOUT_S: Final = 1.0
REMEMBERED: Final = 10_000
"""Dead peers; a fetch from one that has been forgotten began before ten thousand others died."""
NOTHING_POSTED: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)
"""Typed answers of Send: no write was begun, so the buffer is quiet."""
_log = logs.get(__name__)


@dataclass(frozen=True)
class Lessor:
    """A worker whose host tier may be read."""

    endpoint: str
    agent: PeerDescription


@dataclass(frozen=True)
class Reader:
    """What peers must share with this process, and who it is."""

    peer: common_pb2.PeerId
    model: common_pb2.ModelIdentity
    data_centre: str
    host: str
    signer: Signer
    """Of agents, this process's and peers'."""


class Lessors:
    """Workers of the same model, layout and data centre, as the registry tells; those of this host first."""

    def __init__(self, own: Reader) -> None:
        self._own = own
        self._members: dict[str, tuple[bool, Lessor]] = {}
        self.order: tuple[str, ...] = ()
        """Replaced, never changed: other threads read it."""

    async def follow(self, registry: Registry) -> None:
        """Keep up with the registry, for ever."""
        async for event in registry.watch(frozenset({Role.PREFILL, Role.DECODE})):
            replica = event.replica
            lessor = None if isinstance(event, Removed) else self._lessor(replica)
            if lessor is None:
                self._members.pop(replica.incarnation, None)
            else:
                self._members[replica.incarnation] = (replica.host != self._own.host, lessor)
            self.order = tuple(sorted(self._members, key=lambda each: (self._members[each][0], each)))

    def find(self, incarnation: str) -> Lessor:
        """Raises PeerUnreachable: it has left."""
        found = self._members.get(incarnation)
        if found is None:
            raise PeerUnreachable(f"{short(incarnation)} has left")
        return found[1]

    def _lessor(self, replica: Replica) -> Lessor | None:
        """None for this process, other models, other data centres, those that are not up, and those without a tier."""
        own = self._own
        fingerprints = (own.model.model_fingerprint, own.model.layout_fingerprint)
        if (
            replica.incarnation == own.peer.incarnation
            or replica.data_centre != own.data_centre
            or (replica.model_fp, replica.layout_fp) != fingerprints
            or replica.state not in (State.READY, State.DRAINING)
            or not replica.ranks
        ):
            return None
        try:
            wire = common_pb2.TransferAgent.FromString(replica.ranks[0].agent)
            agent = agent_from_wire(wire, "agent", self._own.signer)
        except (DecodeError, InvalidArgument, PermissionDenied) as error:
            _log.warning("a member's transfer agent cannot be read", replica=replica.id, error=str(error))
            return None
        if not any(region.role is RegionRole.READABLE for region in agent.regions):
            return None
        return Lessor(replica.endpoint, agent)


class GrpcPeerWire:
    """A PeerWire (kvcache/host/peers.py). Its methods may be called from any thread; the work is done on the loop."""

    def __init__(self, own: Reader, lessors: Lessors, transfer: TransferEngine, channels: Channels) -> None:
        """Made on the event loop's thread."""
        self._own = own
        self._lessors = lessors
        self._transfer = transfer
        self._channels = channels
        self._loop = asyncio.get_running_loop()
        self._unquiet: dict[str, set[Fetching]] = {}
        """Fetches that a lessor writes, until it says that it is done."""
        self._dead: LastKeys[str] = LastKeys(REMEMBERED)
        """Incarnations known to be dead, which never come back (L14); the last ones."""

    def candidates(self) -> Sequence[str]:
        return self._lessors.order

    def lookup(self, peer: str, keys: Sequence[Key], timeout_s: float) -> Future[Sequence[bool]]:
        async def call(stub: cache_pb2_grpc.CachePeerServiceAsyncStub) -> Sequence[bool]:
            answer = await stub.Lookup(cache_pb2.LookupRequest(keys=keys), timeout=timeout_s)
            return list(answer.there)

        return self._begin(self._call(peer, call))

    def lease(self, peer: str, keys: Sequence[Key], seconds: float, timeout_s: float) -> Future[Granted]:
        request = cache_pb2.LeaseRequest(reader=self._own.peer, keys=keys, lease_ms=max(1, round(seconds * 1000)))

        async def call(stub: cache_pb2_grpc.CachePeerServiceAsyncStub) -> Granted:
            try:
                answer = await stub.Lease(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    # Busy is not unreachable (L12): the entries are absent for now.
                    return Granted("", ())
                raise
            entries = (leased_from_wire(entry) for entry in answer.entries)
            return Granted(answer.lease_id, tuple(entry for entry in entries if entry is not None))

        return self._begin(self._call(peer, call))

    def release(self, peer: str, lease: Granted) -> None:
        request = cache_pb2.ReleaseRequest(reader=self._own.peer, lease_id=lease.id)

        async def call(stub: cache_pb2_grpc.CachePeerServiceAsyncStub) -> None:
            await stub.Release(request, timeout=RELEASE_TIMEOUT_S)

        async def tell() -> None:
            try:
                await self._call(peer, call)
            except PeerUnreachable as error:
                _log.debug("a lease was not given back and ends by itself", peer=short(peer), error=str(error))

        self._begin(tell())

    def fetch(self, peer: str, lease: Granted, arrivals: Sequence[Arrival], timeout_s: float) -> Fetching:
        fetching = Fetching()
        for future in (fetching.settled, fetching.terminal):
            future.set_running_or_notify_cancel()
        begun = self._begin(self._fetch(fetching, peer, lease, arrivals, self._loop.time() + timeout_s))
        begun.add_done_callback(lambda done: _end(fetching, done.exception()) if done.exception() else None)
        return fetching

    def lessor_died(self, incarnation: str) -> None:
        """On evidence: nothing of it writes here any more (L6). On the loop's thread."""
        self._dead.add(incarnation)
        for fetching in self._unquiet.pop(incarnation, set()):
            _end(fetching, PeerUnreachable(f"{short(incarnation)} is dead"))

    @property
    def unquiet(self) -> int:
        """Fetches that a lessor may still write."""
        return sum(map(len, self._unquiet.values()))

    # --- on the loop ---------------------------------------------------------------------------------------------

    async def _fetch(
        self, fetching: Fetching, peer: str, lease: Granted, arrivals: Sequence[Arrival], ends: float
    ) -> None:
        """Begin it; raises PeerUnreachable while nothing can write into the buffer."""
        lessor = self._lessors.find(peer)
        try:
            async with asyncio.timeout_at(ends):
                if self._transfer.wire_to(peer) is None:
                    await asyncio.wrap_future(self._transfer.connect(lessor.agent))
            wire = self._transfer.wire_to(peer)
            if wire is not None and "tcp" in wire.split("+"):
                await self._have_sent(fetching, peer, lease, arrivals, ends)
                return
            spans = [Span(each.offset, each.entry.offset, each.entry.info.length) for each in arrivals]
            copy = self._transfer.copy(
                Direction.READ, peer, spans, region=FETCHED, timeout_s=max(0.001, ends - self._loop.time())
            )
        except (TransferError, TimeoutError) as error:
            raise PeerUnreachable(f"nothing can be read from {short(peer)}: {error}") from error
        copy.settled.add_done_callback(lambda done: _settle(fetching, done.exception()))
        copy.terminal.add_done_callback(lambda done: fetching.terminal.set_result(done.result()))

    async def _have_sent(
        self, fetching: Fetching, peer: str, lease: Granted, arrivals: Sequence[Arrival], ends: float
    ) -> None:
        """Let the lessor write. From here on only its word, or its death, says that the buffer is quiet. Raises
        PeerUnreachable, and nothing was asked of it: it has left, or died, while it was connected to."""
        own, endpoint = self._own, self._lessors.find(peer).endpoint
        if peer in self._dead:
            raise PeerUnreachable(f"{short(peer)} is dead")
        request = cache_pb2.SendRequest(
            lease_id=lease.id,
            reader=agent_to_wire(self._transfer.describe(), own.peer.replica_id, own.model, own.signer),
            targets=[cache_pb2.SendTarget(key=each.entry.info.key, offset=each.offset) for each in arrivals],
            time_left_ms=max(1, round(1000 * (ends - self._loop.time()))),
        )

        async def call(stub: cache_pb2_grpc.CachePeerServiceAsyncStub) -> cache_pb2.SendResponse:
            return await stub.Send(request)

        self._unquiet.setdefault(peer, set()).add(fetching)
        late = self._loop.call_at(ends, _settle, fetching, PeerUnreachable(f"{short(peer)} is late"))
        try:
            answer = await self._call(peer, call, endpoint)
        except PeerUnreachable as error:
            _settle(fetching, error)
            cause = error.__cause__
            if not isinstance(cause, grpc.aio.AioRpcError) or cause.code() not in NOTHING_POSTED:
                # No answer is no evidence: the lessor may be stopped with a write on the wire.
                return
        else:
            _settle(fetching, None if answer.complete else PeerUnreachable(f"{short(peer)} could not write all"))
        finally:
            late.cancel()
        self._unquiet.get(peer, set()).discard(fetching)
        _end(fetching, None)

    async def _call(
        self,
        peer: str,
        call: Callable[[cache_pb2_grpc.CachePeerServiceAsyncStub], Coroutine[Any, Any, Any]],
        endpoint: str = "",
    ) -> Any:
        """`endpoint`: where it is, if the caller knows. Raises PeerUnreachable."""
        try:
            async with self._channels.use(endpoint or self._lessors.find(peer).endpoint) as channel:
                return await call(cache_pb2_grpc.CachePeerServiceStub(channel))
        except grpc.aio.AioRpcError as error:
            raise PeerUnreachable(f"{short(peer)}: {error.code().name}: {error.details()}") from error

    def _begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run it on the loop. What is cancelled with the process is unreachable to whoever waits."""
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()

        async def run() -> None:
            try:
                done.set_result(await work)
            except asyncio.CancelledError:
                done.set_exception(PeerUnreachable("this process is going down"))
                raise
            except Exception as error:  # noqa: BLE001 - raised where the future is waited for
                done.set_exception(error)

        try:
            asyncio.run_coroutine_threadsafe(run(), self._loop)
        except RuntimeError as error:
            work.close()
            done.set_exception(PeerUnreachable(f"this process is going down: {error}"))
        return done


def _settle(fetching: Fetching, error: BaseException | None) -> None:
    """End the wait, once; whatever went wrong, the peer could not be read."""
    if fetching.settled.done():
        return
    if error is None:
        fetching.settled.set_result(None)
    elif isinstance(error, PeerUnreachable):
        fetching.settled.set_exception(error)
    else:
        fetching.settled.set_exception(PeerUnreachable(str(error)))


def _end(fetching: Fetching, error: BaseException | None) -> None:
    """The buffer is quiet."""
    _settle(fetching, error)
    if not fetching.terminal.done():
        fetching.terminal.set_result(None)
