"""The workers that this router may use: membership, channels, streams and loads, kept by incarnation (L14)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cached_property

import grpc.aio

from headrace.router.fleet import Fleet
from headrace.router.native.build import NativeRouter
from headrace.router.ranks import RankNumbers
from headrace.router.reports import Report
from headrace.router.topology import Candidate, RankId, Role
from headrace.services.router.attach import DecodeLink
from headrace.services.router.attempt_numbers import AttemptNumbers
from headrace.services.router.balance import Balance
from headrace.services.router.settings import RouterSettings
from headrace.services.runtime import logs
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import Unavailable
from headrace.services.runtime.registry import base
from headrace.services.runtime.server import open_channel
from headrace.services.runtime.tls import Tls
from headrace.v1 import common_pb2, decode_pb2_grpc, encoder_pb2_grpc, prefill_pb2_grpc

_ROLES = {base.Role.ENCODER: Role.ENCODER, base.Role.PREFILL: Role.PREFILL, base.Role.DECODE: Role.DECODE}
_log = logs.get(__name__)
SETTLE_S = 0.01
"""A report that arrives this soon after work was sent was probably written before it; the work then counts on top."""


@dataclass(eq=False)
class Worker:
    """One life of one replica and the ways to it."""

    replica: base.Replica
    channel: grpc.aio.Channel
    link: DecodeLink | None = None
    """Decode replicas only."""
    ranks: tuple[RankId, ...] = field(default=())

    @cached_property
    def peer(self) -> common_pb2.PeerId:
        """Not to be changed."""
        return common_pb2.PeerId(replica_id=self.replica.id, incarnation=self.replica.incarnation)

    # A stub makes a callable for each of its service's methods: once per worker, not once per request.

    @cached_property
    def decode(self) -> decode_pb2_grpc.DecodeServiceAsyncStub:
        return decode_pb2_grpc.DecodeServiceStub(self.channel)

    @cached_property
    def prefill(self) -> prefill_pb2_grpc.PrefillServiceAsyncStub:
        return prefill_pb2_grpc.PrefillServiceStub(self.channel)

    @cached_property
    def encoder(self) -> encoder_pb2_grpc.EncoderServiceAsyncStub:
        return encoder_pb2_grpc.EncoderServiceStub(self.channel)


@dataclass(frozen=True)
class ModelGroup:
    """What all engine workers of the model agree on (the registry refuses others)."""

    model_fp: bytes
    layout_fp: bytes
    row_fp: bytes
    block_tokens: int
    context_tokens: int


class Workers:
    """Follows the registry. Everything here belongs to the event loop's thread."""

    def __init__(
        self,
        settings: RouterSettings,
        router: common_pb2.PeerId,
        clock: Clock,
        native: NativeRouter | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`native`: the C++ part of decisions; None: Python decides."""
        self._settings = settings
        self._tls = tls
        self._router = router
        self._clock = clock
        self.fleet = Fleet(
            RankNumbers(),
            stale_after_s=settings.router.load_stale_seconds,
            half_life_s=settings.balance.half_life_seconds,
            settle_s=SETTLE_S,
        )
        self.balance = Balance(self.fleet, settings.balance, native)
        self.numbers = AttemptNumbers(clock)
        self._workers: dict[tuple[str, str], Worker] = {}
        self.on_joined: Callable[[Worker], None] = lambda worker: None
        self.on_left: Callable[[Worker], None] = lambda worker: None
        """Told of every life of a worker, the second before its ranks' numbers are free again."""
        self._errands: set[asyncio.Task[None]] = set()
        self.on_news: Callable[[], None] = lambda: None
        """Called whenever decode may have more room than before."""
        self._group: tuple[tuple[Candidate, ...], ModelGroup] | None = None
        """Of these prefill ranks."""
        self._broken: set[tuple[str, str]] = set()
        """Lives of decode replicas whose stream broke."""
        self._room: dict[RankId, tuple[int, int]] = {}
        """Free slots and rows of decode ranks, as last told."""
        self.closing = False
        """No errand begins anything new."""

    async def follow(self, registry: base.Registry) -> None:
        """Keep up with the registry for ever; a background task of the process."""
        roles = frozenset(_ROLES)
        async for event in registry.watch(roles):
            replica = event.replica
            if replica.model_name != self._settings.model.name:
                continue
            if isinstance(event, base.Removed) or replica.state is not base.State.READY:
                self._withdraw(replica, gone=isinstance(event, base.Removed))
            else:
                self._admit(replica)
            self.on_news()

    def _admit(self, replica: base.Replica) -> None:
        key = (replica.id, replica.incarnation)
        worker = self._workers.get(key)
        joined = worker is None
        if worker is None:
            worker = Worker(replica, self.open_channel(replica.endpoint))
            if replica.role is base.Role.DECODE:
                worker.link = self._link(replica, worker.channel)
            self._workers[key] = worker
            _log.info("worker joined", replica=replica.id, role=replica.role.value)
        worker.replica = replica
        candidates = tuple(_candidate(replica, rank.index, len(replica.ranks)) for rank in replica.ranks)
        worker.ranks = tuple(candidate.id for candidate in candidates)
        self.fleet.put(replica.id, replica.incarnation, candidates)
        if joined:
            self.on_joined(worker)
        for load in replica.loads:
            self.report(replica, common_pb2.LoadReport.FromString(load))

    def open_channel(self, endpoint: str) -> grpc.aio.Channel:
        """A channel of the caller's own to a worker (host:port)."""
        return open_channel(endpoint, self._settings.rpc, tls=self._tls)

    def _link(self, replica: base.Replica, channel: grpc.aio.Channel) -> DecodeLink:
        return DecodeLink(
            self._router,
            channel,
            renew_s=self._settings.router.renew_seconds,
            silence_s=self._settings.router.silence_seconds,
            credit_tokens=self._settings.router.credit_tokens,
            on_load=lambda load: self.report(replica, load),
            on_broken=lambda broken: self._mark(replica, broken=broken),
            life=replica.incarnation,
        )

    def _mark(self, replica: base.Replica, *, broken: bool) -> None:
        life = (replica.id, replica.incarnation)
        if broken:
            self._broken.add(life)
        else:
            self._broken.discard(life)

    def _withdraw(self, replica: base.Replica, *, gone: bool) -> None:
        """Send nothing new there. A worker that drains keeps its streams; one that is gone loses everything."""
        self.fleet.remove(replica.id, replica.incarnation)
        if not gone:
            worker = self._workers.get((replica.id, replica.incarnation))
            if worker is not None:
                worker.replica = replica
            return
        worker = self._workers.pop((replica.id, replica.incarnation), None)
        self._broken.discard((replica.id, replica.incarnation))
        if worker is not None:
            _log.info("worker left", replica=replica.id, role=replica.role.value)
            self.on_left(worker)
            for rank in worker.ranks:
                number = self.fleet.forget(rank)
                if number is not None:
                    self.balance.forget(rank, number)
                self._room.pop(rank, None)
            self.spawn(_close(worker))

    def report(self, replica: base.Replica, load: common_pb2.LoadReport, counts: str | None = None) -> None:
        """A rank's account of itself. `counts`: key of work in the fleet that it counts for certain."""
        rank = RankId(replica.id, replica.incarnation, load.rank)
        encoder = replica.role is base.Role.ENCODER
        report = Report(
            queued_requests=load.queued_requests,
            queued_tokens=load.queued_image_tokens if encoder else load.queued_tokens,
            running_requests=load.running_requests,
            reserved_requests=load.reserved_requests,
            kv_tokens=load.rows_used * replica.capacity.block_tokens,
            slots_used=load.slots_used,
            step=load.step,
            step_s=load.step_us / 1e6,
        )
        self.numbers.see(load.highest_attempt)
        now = self._clock.monotonic()
        if self.fleet.report(rank, report, now, counts):
            self.balance.learn(rank, load, now)
        if replica.role is base.Role.DECODE:
            before = self._room.get(rank, (0, 0))
            self._room[rank] = after = (load.slots_total - load.slots_used, load.rows_total - load.rows_used)
            if after[0] > before[0] or after[1] > before[1]:
                self.on_news()

    def worker(self, rank: RankId) -> Worker:
        """The ways to a rank's replica. Raises Unavailable when that life of it is gone."""
        worker = self._workers.get((rank.replica_id, rank.incarnation))
        if worker is None:
            raise Unavailable(f"replica {rank.replica_id} is gone; try again")
        return worker

    def prefill(self, rank: RankId) -> prefill_pb2_grpc.PrefillServiceAsyncStub:
        """PrefillService of a rank's replica."""
        return self.worker(rank).prefill

    def encoder(self, rank: RankId) -> encoder_pb2_grpc.EncoderServiceAsyncStub:
        """EncoderService of a rank's replica."""
        return self.worker(rank).encoder

    def group(self) -> ModelGroup:
        """What the engine workers agree on. Raises Unavailable while there are no prefill and decode replicas."""
        prefill, decode = self.fleet.candidates(Role.PREFILL), self.fleet.candidates(Role.DECODE)
        if not prefill or not decode:
            missing = "prefill" if not prefill else "decode"
            raise Unavailable(f"no {missing} replica of this model is ready; try again shortly", retry_after_s=1.0)
        if self._group is None or self._group[0] is not prefill:
            replica = self.worker(prefill[0].id).replica
            group = ModelGroup(
                model_fp=replica.model_fp,
                layout_fp=replica.layout_fp,
                row_fp=replica.row_fp,
                block_tokens=replica.capacity.block_tokens,
                context_tokens=replica.capacity.context_tokens,
            )
            self._group = prefill, group
        return self._group[1]

    def broken(self) -> tuple[RankId, ...]:
        """Decode ranks whose stream broke and is not open again."""
        if not self._broken:
            return ()
        lives = (self._workers[life] for life in self._broken if life in self._workers)
        return tuple(rank for worker in lives for rank in worker.ranks)

    def all(self) -> tuple[Worker, ...]:
        """Known workers."""
        return tuple(self._workers.values())

    def members(self) -> tuple[base.Replica, ...]:
        """Known replicas, by id."""
        return tuple(sorted((worker.replica for worker in self._workers.values()), key=lambda replica: replica.id))

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Run a short errand (giving something back) that must not be lost when its request ends."""
        task = asyncio.create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def close(self) -> None:
        """Close every stream and channel, after the errands."""
        self.closing = True
        workers = tuple(self._workers.values())
        self._workers.clear()
        # Whatever one of them raises, the others end first, and then the ways to the workers.
        await asyncio.gather(*self._errands, return_exceptions=True)
        await asyncio.gather(*(_close(worker) for worker in workers))


async def _close(worker: Worker) -> None:
    if worker.link is not None:
        await worker.link.stop()
    await worker.channel.close()


def _candidate(replica: base.Replica, rank: int, ranks: int) -> Candidate:
    """Capacities are told over all ranks and taken as equal."""
    return Candidate(
        id=RankId(replica.id, replica.incarnation, rank),
        role=_ROLES[replica.role],
        data_centre=replica.data_centre,
        host=replica.host,
        rows=replica.capacity.rows // max(1, ranks),
        slots=replica.capacity.slots // max(1, ranks),
        block_tokens=replica.capacity.block_tokens or 1,
        context_tokens=replica.capacity.context_tokens,
        row_bytes=replica.capacity.row_bytes,
        slot_bytes=replica.capacity.slot_bytes,
        queue_requests=replica.capacity.queue_requests,
    )
