"""The router process: the front door, and the registry of a one-machine cluster."""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from pathlib import Path

from headrace.compiler import NativeUnavailable
from headrace.kvcache.index.open import is_redis
from headrace.router.admission import Admission, AdmissionLimits, Cause
from headrace.router.balancers.encoder import CachedImages
from headrace.router.native.build import NativeRouter, load_native
from headrace.router.topology import Role
from headrace.services.router.admission import AdmissionDesk
from headrace.services.router.adoption import Adoption
from headrace.services.router.attempt import Attempts
from headrace.services.router.buckets import SharedBuckets
from headrace.services.router.caches import ClusterCaches
from headrace.services.router.constraint import Constraints
from headrace.services.router.fetch import ImageFetcher
from headrace.services.router.generate import Generation
from headrace.services.router.images import ImageStage
from headrace.services.router.key_stores import KeyStoreError, open_keys
from headrace.services.router.limits import Limiter, Routers
from headrace.services.router.model import load_served_model
from headrace.services.router.prefix_metrics import add_prefix_metrics
from headrace.services.router.prefixes import Prefixes
from headrace.services.router.reserve import Reserver
from headrace.services.router.service import InferenceServicer
from headrace.services.router.settings import RouterSettings
from headrace.services.router.snapshots import SnapshotPlanner
from headrace.services.router.store_lookup import open_lookup
from headrace.services.router.tenants import Tenants
from headrace.services.router.tokens import TokenVerifier
from headrace.services.router.workers import Workers
from headrace.services.runtime import logs
from headrace.services.runtime.control import Inspection, conservation
from headrace.services.runtime.engine_errors import translate
from headrace.services.runtime.lifecycle import Lifecycle, run_service
from headrace.services.runtime.process import ServiceProcess
from headrace.services.runtime.registry.base import Registry
from headrace.services.runtime.registry.embedded import EmbeddedRegistry
from headrace.services.runtime.registry.open import open_registry
from headrace.services.runtime.registry.service import RegistryServicer
from headrace.services.runtime.registry.wire import to_wire
from headrace.services.runtime.settings_load import SettingsError
from headrace.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)

_log = logs.get(__name__)


def run(settings: RouterSettings) -> int:
    """Serve until told to stop; returns the exit status."""
    if settings.model.folder is None:
        raise SettingsError("model.folder is needed: name the model's folder (the router reads its tokenizer)")
    secret = settings.router.salt_secret
    if secret is not None and len(secret.get_secret_value().encode()) < 16:
        raise SettingsError("router.salt_secret needs at least 16 characters")
    salt = secrets.token_bytes(32) if secret is None else secret.get_secret_value().encode()
    own_key = settings.router.operator_key
    tenants = Tenants(
        salt,
        settings.router.tenants,
        "" if own_key is None else own_key.get_secret_value(),
        keyed=settings.router.keys is not None,
        tokens=None if settings.tokens.keys is None else TokenVerifier(settings.tokens),
    )
    return run_service(partial(_start, settings, settings.model.folder, tenants), settings.stop)


async def _start(settings: RouterSettings, folder: Path, tenants: Tenants, life: Lifecycle) -> None:
    process = ServiceProcess(settings, life, translate, settings.front)
    model = await asyncio.to_thread(load_served_model, settings.model.name, folder, settings.router.protocol)
    native = await asyncio.to_thread(_native)
    workers = Workers(settings, process.peer, process.clock, native, process.tls)
    life.on_close("workers", workers.close)
    waits = process.metrics.histogram("admission_wait_seconds", "Time in the queue before the first turn")
    desk = AdmissionDesk(Admission(_limits(settings)), process.clock, waits.observe)
    workers.on_news = desk.news
    life.spawn(desk.run(), "admission-clock")
    prefixes = Prefixes(settings.index, workers.fleet.numbers, process.clock, open_lookup(settings.index), native)
    life.on_close("prefixes", prefixes.close)
    workers.on_joined, workers.on_left = prefixes.joined, prefixes.left
    snapshots = SnapshotPlanner(settings, model)
    constraints = Constraints(model, settings.requests, process.clock)
    life.on_close("constraints", partial(asyncio.to_thread, constraints.close))
    encoders = CachedImages(workers.fleet)
    generation = Generation(
        settings,
        model,
        workers,
        ImageStage(workers, encoders, model.vision, process.peer, process.clock),
        Reserver(
            workers,
            workers.balance.pairs,
            workers.balance.conditional,
            prefixes,
            process.clock,
            settings.router.reserve_timeout_seconds,
            settings.requests.constraint_seconds,
        ),
        Attempts(workers, prefixes, process.clock),
        Adoption(workers, process.peer, process.clock, settings.router.adopt_timeout_seconds),
        desk,
        snapshots,
        constraints,
        process.peer,
        process.clock,
    )
    registry = _registry(settings, process)
    life.on_close("registry", registry.close)
    await _follow_credentials(settings, process, tenants)
    limiter = _limiter(settings, process, registry)
    fetcher = ImageFetcher(settings.fetch, int(settings.requests.max_image_bytes))
    life.on_close("image-fetch", fetcher.close)
    process.server.add(
        inference_pb2_grpc.add_InferenceServiceServicer_to_server,
        InferenceServicer(settings, model, tenants, generation, workers, limiter, fetcher),
        inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
        admits=("Generate",),
    )
    _metrics(process, generation, desk, workers, snapshots)
    add_prefix_metrics(process.metrics, prefixes)
    process.metrics.gauge(
        "embeddings_remembered", "Image embeddings that encoders are believed to hold", lambda: encoders.remembered
    )

    async def inspect(check: bool) -> Inspection:
        return _inspection(generation, desk, workers, prefixes, check)

    caches = ClusterCaches(settings, model, tenants, workers)
    await process.serve(inspect, lambda: len(generation.live), process.replica, caches, tenants.operator)
    life.spawn(workers.follow(registry), "membership-watch")
    await process.join(process.replica(), _canary, registry)


def _native() -> NativeRouter | None:
    """The C++ part of decisions. Without a compiler Python decides the same, several times slower, which is told."""
    try:
        return load_native()
    except NativeUnavailable as reason:
        _log.warning("decisions are made in Python, which is slower", reason=str(reason))
        return None


def shared_buckets_url(settings: RouterSettings) -> str | None:
    """Redis of the tenants' buckets: the setting's own, else the one of the stores' index, if that is in one."""
    index = settings.index.store_index
    return settings.limits.shared or (index if is_redis(index) else None)


def _limiter(settings: RouterSettings, process: ServiceProcess, registry: Registry) -> Limiter:
    """Raises RedisUrlError for an address that is none."""
    section, url = settings.limits, shared_buckets_url(settings)
    shared = None if url is None else SharedBuckets(url, section.prefix, section.deadline_ms / 1000, process.clock)
    routers = Routers()
    process.life.spawn(routers.follow(registry), "routers-watch")
    limiter = Limiter(shared, routers, process.clock)
    process.life.on_close("limits", limiter.close)
    process.metrics.gauges(
        "limit_refusals",
        "Requests refused since start for what their tenant may ask for, by limit",
        ("limit",),
        lambda: {(limit,): limiter.refused[limit] for limit in ("rate", "concurrent")},
    )
    process.metrics.gauge(
        "limit_decisions_by_share", "Decisions of limits without the shared buckets", lambda: limiter.by_share
    )
    return limiter


async def _follow_credentials(settings: RouterSettings, process: ServiceProcess, tenants: Tenants) -> None:
    """Who may call, before the port opens, and from then on. Raises SettingsError when the keys cannot be read."""
    process.life.spawn(tenants.follow(), "credentials")
    if settings.router.keys is None:
        return
    store = open_keys(settings.router.keys, settings.registry, settings.rpc, process.tls)
    process.life.on_close("keys", store.close)
    try:
        tenants.take(await store.read())
    except KeyStoreError as error:
        raise SettingsError(f"router.keys: {error}") from error

    async def follow() -> None:
        async for document in store.follow():
            tenants.take(document)

    process.life.spawn(follow(), "keys")


def _registry(settings: RouterSettings, process: ServiceProcess) -> Registry:
    """Embedded: this process holds the membership table and serves it to the workers."""
    if settings.registry.kind == "etcd":
        return open_registry(settings.registry, settings.rpc, process.tls)
    embedded = EmbeddedRegistry()
    process.server.add(
        registry_pb2_grpc.add_RegistryServiceServicer_to_server,
        RegistryServicer(embedded.table),
        registry_pb2.DESCRIPTOR.services_by_name["RegistryService"],
    )
    return embedded


async def _canary() -> None:
    """The router's own way to an answer goes through workers that pass their own canaries; without any it still says so
    with a typed error, so it is ready once its registry answers."""


def _metrics(
    process: ServiceProcess,
    generation: Generation,
    desk: AdmissionDesk,
    workers: Workers,
    snapshots: SnapshotPlanner,
) -> None:
    metrics = process.metrics
    metrics.live_set("requests", "Requests", generation.live)
    metrics.gauges(
        "requests_recovered",
        "Attempts that were not a request's first, and resumed requests, since start",
        ("how",),
        lambda: {(how,): generation.recovered[how] for how in ("retried", "continued", "adopted", "regenerated")},
    )
    metrics.gauge("requests_running", "Requests in the cluster", lambda: desk.running)
    metrics.gauge("requests_waiting", "Requests that wait for admission", lambda: desk.waiting)
    metrics.gauge("admission_waiting_tokens", "Uncached tokens that wait for admission", lambda: desk.waiting_tokens)
    metrics.gauges(
        "admission_waiting",
        "Requests that wait for admission, by priority",
        ("priority",),
        lambda: {(str(priority),): count for priority, count in desk.waiting_by_priority().items()},
    )
    metrics.gauges(
        "admission_rejected",
        "Requests turned away since start, by cause",
        ("cause",),
        lambda: {(cause.value,): desk.rejected[cause] for cause in Cause},
    )
    metrics.gauge("forks_found", "Prompts that left a known chain of blocks", lambda: snapshots.found)
    metrics.gauge("forks_remembered_blocks", "Blocks of recent prompts", lambda: snapshots.remembered)
    metrics.gauges(
        "workers",
        "Ready ranks, by role",
        ("role",),
        lambda: {(role.value,): len(workers.fleet.candidates(role)) for role in Role},
    )
    metrics.gauges(
        "load_reports_absurd",
        "Load reports that could not be true, of ranks that are known",
        ("replica", "rank"),
        lambda: {(rank.replica_id, str(rank.rank)): count for rank, count in workers.fleet.absurd.items()},
    )
    metrics.gauges(
        "rank_slowness",
        "Time of a rank's steps against what its peers would need",
        ("replica", "rank"),
        lambda: workers.balance.slowness(process.clock.monotonic()),
    )


def _limits(settings: RouterSettings) -> AdmissionLimits:
    section = settings.admission
    return AdmissionLimits(
        max_running=section.max_running,
        max_waiting=section.max_waiting,
        max_waiting_tokens=section.max_waiting_tokens,
        tenant_share=section.tenant_share if settings.asks_who_calls else 1.0,
        quantum_tokens=section.quantum_tokens,
        room_wait_s=section.capacity_wait_seconds,
    )


def _inspection(
    generation: Generation, desk: AdmissionDesk, workers: Workers, prefixes: Prefixes, check: bool
) -> Inspection:
    live = generation.live
    problems: list[str] = []
    if check and not len(live) and not (desk.idle and workers.fleet.idle):
        problems.append("no request is live, but the queue or loads hold some")
    links = sum(worker.link.live for worker in workers.all() if worker.link is not None)
    if check and not len(live) and links:
        problems.append(f"no request is live, but {links} feeds are open")
    if check:
        problems += prefixes.problems()
    return Inspection(
        requests=conservation(live),
        members=tuple(to_wire(replica) for replica in workers.members()),
        problems=tuple(problems),
    )
