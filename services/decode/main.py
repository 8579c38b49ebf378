"""The decode process: load the model, make room for peers' writes, warm up, serve."""

from __future__ import annotations

import asyncio
from math import ceil

from headrace.engine.decode import decode_role
from headrace.engine.messages import EndAll, Event, Finished, FinishReason, GetStatus, SenderDied, Submit
from headrace.engine.request import RequestKey
from headrace.kvcache.event_log import EventLog, Source
from headrace.services.decode.attach import AttachHub, reap_journals
from headrace.services.decode.journals import Journals
from headrace.services.decode.landing import LandingKeeper, make_landing, register_landing
from headrace.services.decode.last_words import LastWords, asking
from headrace.services.decode.service import DecodeServicer
from headrace.services.decode.settings import DecodeSettings
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.control import Inspection
from headrace.services.runtime.engine_errors import translate
from headrace.services.runtime.lifecycle import Lifecycle
from headrace.services.runtime.process import ServiceProcess
from headrace.services.runtime.registry.base import Replica, Role
from headrace.services.worker.canary import TIMEOUT_S, CanaryFailed, canary_request
from headrace.services.worker.channels import Channels
from headrace.services.worker.engine_host import LoadedModel
from headrace.services.worker.engine_link import EngineLink
from headrace.services.worker.lives import Sources, WorkerLives, run_worker
from headrace.services.worker.loads import publish_loads
from headrace.services.worker.member import published_replica
from headrace.services.worker.notices import deliver_notices
from headrace.services.worker.reports import (
    EngineReporter,
    add_engine_metrics,
    add_transfer_metrics,
    conservation,
    load_report,
    pool_statuses,
    transport_statuses,
)
from headrace.services.worker.role_change import RoleChange
from headrace.services.worker.senders import SenderWatch
from headrace.services.worker.tier.assembly import WorkerTier
from headrace.services.worker.tier.peer_wire import Reader
from headrace.services.worker.tier.service import serve_caches
from headrace.services.worker.transfer_host import open_transfer, take_streams
from headrace.v1 import decode_pb2, decode_pb2_grpc

REAP_S = 0.5


def run(settings: DecodeSettings, sources: Sources | None = None) -> int:
    """Serve until told to stop; returns the exit status. `sources`: of the settings, from which a change of role takes
    those of the other role."""
    return run_worker(settings, sources)


async def start(settings: DecodeSettings, lives: WorkerLives, life: Lifecycle) -> None:
    """One life as a decode."""
    process = ServiceProcess(settings, life, translate, lives=lives)
    loaded = await asyncio.to_thread(lives.load, settings)
    change_role = RoleChange(settings, lives, process)
    signer = settings.transfer.signer(tls=settings.tls.on)
    channels = Channels(settings.rpc, process.tls)
    life.on_close("channels", channels.close)
    transfer = open_transfer(
        settings.transfer,
        process,
        channels,
        signer,
        layout_fingerprint=loaded.facts.layout_fp,
        model_fingerprint=loaded.facts.model_fp,
    )
    landing = make_landing(settings, loaded, life.incarnation)
    register_landing(transfer, landing)
    events = EventLog(Source(process.replica_id, life.incarnation), loaded.pool.layout.block_tokens)
    tier = await WorkerTier.open(
        settings.cache,
        loaded.pool,
        replica_id=process.replica_id,
        incarnation=life.incarnation,
        events=events.append,
    )
    life.on_close("cache tier", tier.close)
    own = Reader(process.peer, loaded.facts.wire(), settings.data_centre, settings.host_name, signer)
    tier.meet(own, transfer, channels)
    journals = Journals(
        linger_s=settings.decode.linger_seconds,
        orphan_s=settings.decode.orphan_seconds,
        lease_s=settings.engine.lease_s,
    )
    hub = AttachHub(process.peer, loaded.token_bytes, process.clock, journals)
    canary = Canary(loaded, life.incarnation, process.clock)

    def on_events(events: tuple[Event, ...]) -> None:
        canary.see(events)
        hub.on_events(events)

    engine = loaded.engine(settings, decode_role(landing), process.clock, tier.sink)
    engine.memory.prefix.announce_to(events.append)
    link = EngineLink(engine, on_events, threads=settings.engine.threads)
    reporter = EngineReporter(link)
    hub.link, hub.reporter, canary.link = link, reporter, link
    link.start()
    life.on_close("engine", link.stop)
    tier.connect(link, loads=False)
    servicer = DecodeServicer(
        loaded.facts,
        loaded.grammars,
        process.peer,
        transfer,
        link,
        hub,
        reporter,
        process.clock,
        settings.decode.journal_tokens,
        signer,
    )
    deliver_notices(transfer, servicer.take_notices)

    async def inspect(check: bool) -> Inspection:
        status, problems = await reporter.inspect(check, quiet=lambda: tier.idle)
        return Inspection(
            requests=conservation(status, servicer.refused),
            pools=pool_statuses(status.pools),
            loads=(load_report(status),),
            transports=transport_statuses(transfer.stats()),
            problems=(*problems, *tier.problems()),
        )

    add_engine_metrics(process.metrics, reporter)
    add_transfer_metrics(process.metrics, transfer.stats)
    process.metrics.gauge("decode_requests", "Requests that have not ended", lambda: hub.open)
    process.metrics.gauge("decode_routers", "Attached routers", lambda: hub.streams)
    process.metrics.gauge(
        "decode_slots_booked_peak",
        "Most slots that were booked at once, counted at every reservation",
        lambda: 0 if reporter.status is None else reporter.status.booked_peak,
    )
    process.metrics.gauge("decode_resends", "Commits whose rows did not match", lambda: servicer.resends)

    def published() -> Replica:
        return published_replica(process, loaded, settings, transfer, reporter, signer)

    process.server.add(
        decode_pb2_grpc.add_DecodeServiceServicer_to_server,
        servicer,
        decode_pb2.DESCRIPTOR.services_by_name["DecodeService"],
        admits=("Reserve",),
    )
    take_streams(settings.transfer, process, transfer, signer)
    caches = serve_caches(process, tier, link, loaded.pool.layout, events)

    async def writable() -> int:
        status = await link.call(GetStatus())
        return status.conservation.live + ceil(status.quarantined_bytes / landing.row_bytes)

    change_role.writable = (writable, tier.writable)

    async def hand_over(reason: str) -> None:
        await link.call(EndAll(reason))

    await process.serve(
        inspect,
        lambda: hub.undelivered + servicer.reserving,
        published,
        caches,
        hand_over=hand_over,
        change_role=change_role,
    )
    transfer.listen(process.server.address)
    servicer.announce()
    # Before the server closes, so that routers still hear how their requests ended (L28).
    life.on_close("engine", link.stop)
    life.spawn(reporter.run(), "engine-reporter")
    life.spawn(reap_journals(hub, REAP_S), "journal-reaper")
    registry = await process.join(published(), canary)
    life.spawn(publish_loads(process, reporter.load), "load-publisher")
    for task in tier.tasks(registry):
        life.spawn(task, "cache-peers")
    keeper = LandingKeeper(
        process, transfer, link, servicer.announce, canary, max_regions=settings.decode.max_landing_regions
    )
    reporter.on_status = keeper.see
    life.spawn(keeper.run(), "landing-keeper")

    async def prefill_died(incarnation: str) -> None:
        transfer.sender_died(incarnation)
        await link.call(SenderDied(incarnation))
        reporter.refresh()

    watch = SenderWatch(Role.PREFILL, prefill_died, transfer.sender_left)
    life.spawn(watch.follow(registry), "peer-watch")
    life.spawn(watch.examine(), "peer-examination")
    life.spawn(LastWords(link, watch.endpoint, asking(channels), transfer.forget).run(), "last-words")


class Canary:
    """L18: a short generation through the whole engine; each run is a new attempt of one request."""

    def __init__(self, loaded: LoadedModel, incarnation: str, clock: Clock) -> None:
        self._loaded = loaded
        self._incarnation = incarnation
        self._clock = clock
        self._attempt = 0
        self._ends: dict[RequestKey, asyncio.Future[Finished]] = {}
        self.link: EngineLink
        """Set before the first run; the link needs `see` of this object first."""

    def see(self, events: tuple[Event, ...]) -> None:
        """Events of the engine."""
        if not self._ends:
            return
        for event in events:
            end = self._ends.get(event.key)
            if end is not None and isinstance(event, Finished) and not end.done():
                end.set_result(event)

    async def __call__(self) -> None:
        self._attempt += 1
        deadline = self._clock.monotonic() + TIMEOUT_S
        request = canary_request(self._loaded.model, self._incarnation, deadline, attempt=self._attempt)
        ended = self._ends[request.key] = asyncio.get_running_loop().create_future()
        try:
            await self.link.call(Submit(request))
            end = await ended
        finally:
            del self._ends[request.key]
        if end.reason is not FinishReason.LENGTH:
            raise CanaryFailed(f"the warm-up generation ended with {end.reason.value}: {end.error}")
