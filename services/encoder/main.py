"""The encoder process: load the tower, warm it up, serve."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from functools import partial
from pathlib import Path

import PIL.Image
import torch

from headrace.engine.fingerprint import model_fingerprint
from headrace.engine.loading import folder_dtype, read_config
from headrace.engine.vision.loading import load_vision_tower
from headrace.engine.vision.preprocess import ImageLimits, preprocess
from headrace.engine.vision.tower import VisionTower
from headrace.kvcache.transfer.base import PeerDescription
from headrace.kvcache.transfer.regions import MemoryRegion
from headrace.services.encoder.cache import EmbeddingCache
from headrace.services.encoder.encode import ImageEncoder
from headrace.services.encoder.service import SOURCE, EncoderIdentity, EncoderServicer
from headrace.services.encoder.settings import EncoderSettings
from headrace.services.runtime.control import Inspection, conservation
from headrace.services.runtime.lifecycle import Lifecycle, run_service
from headrace.services.runtime.process import ServiceProcess
from headrace.services.runtime.registry.base import Capacity, Rank, Replica
from headrace.services.runtime.settings_load import SettingsError
from headrace.services.worker.channels import Channels
from headrace.services.worker.loads import publish_loads
from headrace.services.worker.reports import transport_statuses
from headrace.services.worker.signing import Signer
from headrace.services.worker.transfer_host import open_transfer
from headrace.services.worker.transfer_wire import agent_to_wire
from headrace.v1 import common_pb2, control_pb2, encoder_pb2, encoder_pb2_grpc


def run(settings: EncoderSettings) -> int:
    """Serve until told to stop; returns the exit status."""
    if settings.model.folder is None:
        raise SettingsError("model.folder is needed: name the model's folder")
    return run_service(partial(_start, settings, settings.model.folder), settings.stop)


def _load(settings: EncoderSettings, folder: Path) -> tuple[VisionTower, bytes]:
    """The tower in the activation type of the numeric mode, and the model's fingerprint (the same as prefill's)."""
    dtype = torch.bfloat16 if settings.load.numeric_mode == "full" else torch.float32
    tower = load_vision_tower(folder, dtype=dtype, device=torch.device(settings.load.device))
    identity = settings.load.numeric_identity(folder_dtype(read_config(folder)))
    return tower, model_fingerprint(folder, identity)


async def _start(settings: EncoderSettings, folder: Path, life: Lifecycle) -> None:
    process = ServiceProcess(settings, life)
    section = settings.encoder
    if section.threads:
        torch.set_num_threads(section.threads)
    tower, model_fp = await asyncio.to_thread(_load, settings, folder)
    row_bytes = tower.config.text_hidden_size * tower.dtype.itemsize
    cache = EmbeddingCache(
        max(1, int(section.pool_bytes) // row_bytes),
        row_bytes,
        section.max_pending,
        section.lease_seconds,
        process.clock,
    )
    limits = ImageLimits(int(section.max_image_bytes), section.max_image_pixels)
    encoder = ImageEncoder(tower, cache, limits)
    life.on_close("encoder", encoder.close)
    signer = settings.transfer.signer(tls=settings.tls.on)
    channels = Channels(settings.rpc, process.tls)
    life.on_close("channels", channels.close)
    transfer = open_transfer(
        settings.transfer, process, channels, signer, layout_fingerprint=None, model_fingerprint=model_fp
    )
    transfer.register(MemoryRegion(SOURCE, cache.memory))

    capacity = Capacity(embedding_bytes=cache.memory.numel(), queue_requests=section.max_pending)

    def published() -> Replica:
        return published_encoder(process.replica(), settings, model_fp, transfer.describe(), capacity, signer)

    async def inspect(check: bool) -> Inspection:
        free, used, cached = cache.counts()
        pool = control_pb2.PoolStatus(name="embeddings", total=cache.num_rows, free=free, used=used, cached=cached)
        leases = control_pb2.PoolStatus(name="leases", total=cache.leases, used=cache.leases)
        return Inspection(
            requests=conservation(servicer.live),
            pools=(pool, leases),
            loads=(_load_report(cache, encoder),),
            transports=transport_statuses(transfer.stats()),
            problems=cache.integrity() if check else (),
        )

    metrics = process.metrics
    metrics.gauge("encoder_pending_images", "Images asked for and not encoded yet", lambda: cache.pending)
    metrics.gauge("encoder_leases", "Leases on embeddings", lambda: cache.leases)
    metrics.gauge("encoder_rows_free", "Free rows of the embedding pool", lambda: cache.counts()[0])
    metrics.gauge("encoder_images_encoded", "Runs of the tower since start", lambda: encoder.encoded)
    # The address in handles is known only once the port is open.
    identity = EncoderIdentity(process.peer, "", model_fp, str(tower.dtype).removeprefix("torch."))
    servicer = EncoderServicer(
        identity,
        cache,
        encoder,
        transfer,
        lease_s=section.lease_seconds,
        max_images=section.max_images,
        signer=signer,
    )
    process.server.add(
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server,
        servicer,
        encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"],
        admits=("Encode",),
    )
    await process.serve(inspect, lambda: cache.leases + cache.pending, published)
    servicer.announce(process.server.address)
    life.spawn(_reap(cache, section.lease_seconds / 4), "lease-reaper")
    life.spawn(publish_loads(process, partial(_load_report, cache, encoder)), "load-publisher")
    await process.join(published(), partial(_canary, tower, limits))


def published_encoder(
    replica: Replica,
    settings: EncoderSettings,
    model_fp: bytes,
    transfer: PeerDescription,
    capacity: Capacity,
    signer: Signer,
) -> Replica:
    """The membership entry. By the process's identity in its agent, those whom it writes to tell its death from
    silence (L6)."""
    model = common_pb2.ModelIdentity(name=settings.model.name, model_fingerprint=model_fp)
    agent = agent_to_wire(transfer, replica.id, model, signer)
    return replace(
        replica,
        model_name=settings.model.name,
        model_fp=model_fp,
        capacity=capacity,
        ranks=(Rank(0, settings.load.device, agent.SerializeToString()),),
    )


def _load_report(cache: EmbeddingCache, encoder: ImageEncoder) -> common_pb2.LoadReport:
    """What waits for the tower, as of so many of its runs."""
    return common_pb2.LoadReport(
        queued_requests=cache.pending, queued_image_tokens=cache.pending_tokens, step=encoder.encoded
    )


async def _reap(cache: EmbeddingCache, period_s: float) -> None:
    """L9: leases end by their own clock, whether or not anybody asks for something."""
    while True:
        await asyncio.sleep(period_s)
        cache.reap()


async def _canary(tower: VisionTower, limits: ImageLimits) -> None:
    """L18: one small picture through the whole tower."""
    buffer = io.BytesIO()
    side = tower.config.patch_size * tower.config.downsample_ratio
    PIL.Image.new("RGB", (side, side), (200, 30, 30)).save(buffer, format="PNG")

    def encode() -> None:
        patches, plan = preprocess(buffer.getvalue(), tower.config, limits)
        with torch.inference_mode():
            span = tower.encode(patches, plan)
        if not bool(torch.isfinite(span).all()):
            raise RuntimeError("the warm-up picture gave embeddings that are not finite; check the weights")

    await asyncio.to_thread(encode)
