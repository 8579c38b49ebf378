"""The prefill process: load the model, warm it up, serve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from itertools import count

import torch

from headrace.engine.messages import HandedOver, Prefill
from headrace.engine.prefill import PrefillRole
from headrace.kvcache.event_log import EventLog, Source
from headrace.kvcache.handle import ChecksumKind, PayloadKind
from headrace.kvcache.landing import LandingRegion
from headrace.kvcache.landing_types import LandingIdentity
from headrace.kvcache.transfer.base import TransferEngine
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole
from headrace.services.prefill.embeddings import EmbeddingReceiver
from headrace.services.prefill.service import PrefillServicer
from headrace.services.prefill.settings import PrefillSettings
from headrace.services.runtime.control import Inspection
from headrace.services.runtime.engine_errors import translate
from headrace.services.runtime.lifecycle import Lifecycle
from headrace.services.runtime.process import ServiceProcess
from headrace.services.runtime.registry.base import Replica, Role
from headrace.services.worker.canary import TIMEOUT_S, canary_request
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
from headrace.services.worker.signing import Signer
from headrace.services.worker.tier.assembly import WorkerTier
from headrace.services.worker.tier.peer_wire import Reader
from headrace.services.worker.tier.service import serve_caches
from headrace.services.worker.transfer_host import open_transfer, take_streams
from headrace.v1 import control_pb2, prefill_pb2, prefill_pb2_grpc

EMBEDDINGS = "embeddings"
"""Name under which the landing region of embeddings is registered."""


def run(settings: PrefillSettings, sources: Sources | None = None) -> int:
    """Serve until told to stop; returns the exit status. `sources`: of the settings, from which a change of role takes
    those of the other role."""
    return run_worker(settings, sources)


async def start(settings: PrefillSettings, lives: WorkerLives, life: Lifecycle) -> None:
    """One life as a prefill."""
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
    for region in loaded.source_regions():
        transfer.register(region)
    receiver = _receiver(settings, loaded, transfer, channels, process, signer)
    if receiver is not None:
        life.on_close("recalls", receiver.close)
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
    servicer = PrefillServicer(
        settings.prefill,
        loaded,
        transfer,
        channels,
        process.peer,
        receiver,
        process.clock,
        tier,
        draining=lambda: process.server.draining,
        signer=signer,
    )
    engine = loaded.engine(settings, PrefillRole, process.clock, tier.sink)
    engine.memory.prefix.announce_to(events.append)
    link = EngineLink(engine, servicer.on_events, threads=settings.engine.threads)
    servicer.link = link
    link.start()
    life.on_close("engine", link.stop)
    tier.connect(link, loads=True)
    life.on_close("transfers", servicer.close)
    reporter = EngineReporter(link)
    servicer.on_change = reporter.refresh

    async def inspect(check: bool) -> Inspection:
        status, problems = await reporter.inspect(check, quiet=lambda: servicer.live == 0 and tier.idle)
        pools = list(pool_statuses(status.pools))
        if receiver is not None:
            landed = receiver.landing.integrity()
            rows = landed.rows
            pools.append(
                control_pb2.PoolStatus(
                    name="embedding_landing_rows",
                    total=rows.capacity,
                    free=rows.free,
                    used=rows.open + rows.quiet,
                    quarantined=rows.quarantined,
                )
            )
            problems = (*problems, *landed.problems)
        return Inspection(
            requests=conservation(status, servicer.refused),
            pools=tuple(pools),
            loads=(load_report(status),),
            transports=transport_statuses(transfer.stats()),
            problems=(*problems, *tier.problems()),
        )

    add_engine_metrics(process.metrics, reporter)
    add_transfer_metrics(process.metrics, transfer.stats)
    process.metrics.gauge("prefill_runs", "Runs and transfers that are not terminal", lambda: servicer.live)
    process.metrics.gauges(
        "push_bytes",
        "Bytes pushed to decode since start, by transport",
        ("transport",),
        lambda: {(transport,): count for transport, count in servicer.pushed_bytes.items()},
    )
    process.metrics.gauge("prefill_resends", "Grants for rows that did not match", lambda: servicer.resends)

    def published() -> Replica:
        return published_replica(process, loaded, settings, transfer, reporter, signer)

    process.server.add(
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
        servicer,
        prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"],
    )
    if receiver is not None:
        take_streams(settings.transfer, process, transfer, signer)
    caches = serve_caches(process, tier, link, loaded.pool.layout, events)
    change_role.writable = (tier.writable,) if receiver is None else (tier.writable, receiver.writable)
    await process.serve(
        inspect,
        lambda: servicer.live,
        published,
        caches,
        hand_over=servicer.hand_over,
        change_role=change_role,
    )
    if receiver is not None:
        transfer.listen(process.server.address)
        receiver.announce()
    life.spawn(reporter.run(), "engine-reporter")
    registry = await process.join(published(), partial(_canary, servicer, link, loaded, process, count(1)))
    life.spawn(publish_loads(process, reporter.load), "load-publisher")
    for task in tier.tasks(registry):
        life.spawn(task, "cache-peers")

    async def decode_died(incarnation: str) -> None:
        await asyncio.wrap_future(transfer.disconnect(incarnation))

    watches = [SenderWatch(Role.DECODE, decode_died)]
    if receiver is not None:
        encoders = SenderWatch(Role.ENCODER, receiver.sender_died, transfer.sender_left)
        receiver.endpoint_of = encoders.endpoint
        watches.append(encoders)
        deliver_notices(transfer, receiver.take_notices)
    for watch in watches:
        life.spawn(watch.follow(registry), "peer-watch")
        life.spawn(watch.examine(), "peer-examination")


def _receiver(
    settings: PrefillSettings,
    loaded: LoadedModel,
    transfer: TransferEngine,
    channels: Channels,
    process: ServiceProcess,
    signer: Signer,
) -> EmbeddingReceiver | None:
    """Landing memory for embeddings in the encoder's activation type; None for a text model."""
    if loaded.model.image_token_id is None:
        return None
    dtype = torch.bfloat16 if settings.load.numeric_mode == "full" else torch.float32
    row_bytes = loaded.model.hidden_size * dtype.itemsize
    landing = LandingRegion(
        LandingIdentity(
            incarnation=process.life.incarnation,
            layout_fingerprint=loaded.facts.layout_fp,
            model_fingerprint=loaded.facts.model_fp,
            checksum_kind=ChecksumKind.XXH3_64,
            payload=PayloadKind.EMBEDDING,
        ),
        row_bytes=row_bytes,
        slot_bytes=0,
        num_rows=max(1, int(settings.prefill.embedding_bytes) // row_bytes),
        num_slots=0,
    )
    transfer.register(
        MemoryRegion(EMBEDDINGS, landing.rows, RegionRole.LANDING_ROWS, PayloadKind.EMBEDDING, landing.version)
    )
    return EmbeddingReceiver(landing, transfer, channels, process.peer, loaded.facts.wire(), dtype, signer)


async def _canary(
    servicer: PrefillServicer, link: EngineLink, loaded: LoadedModel, process: ServiceProcess, attempts: Iterator[int]
) -> None:
    """L18: a small prompt through the whole engine, up to its first token; each run is a new attempt of one request."""
    deadline = process.clock.monotonic() + TIMEOUT_S
    request = canary_request(loaded.model, process.life.incarnation, deadline, attempt=next(attempts))
    done = servicer.await_done(request.key)
    await link.call(Prefill(request))
    await done
    await link.call(HandedOver(request.key))
