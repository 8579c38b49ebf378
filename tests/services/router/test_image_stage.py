"""ImageStage over sockets: real encoders in this process, real towers, the router's balancer between them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import PIL.Image
import pytest
import pytest_asyncio

from headrace.engine.vision.preprocess import ImageLimits
from headrace.router.balancers.encoder import CachedImages
from headrace.router.fleet import Fleet
from headrace.router.ranks import RankNumbers
from headrace.router.topology import Candidate, RankId, Role
from headrace.services.encoder.cache import EmbeddingCache
from headrace.services.encoder.encode import ImageEncoder
from headrace.services.encoder.service import EncoderIdentity, EncoderServicer
from headrace.services.router.images import EncodedImages, ImageStage, _release, _renew
from headrace.services.router.prepare import Prepared
from headrace.services.router.tenants import TenantKeys
from headrace.services.router.workers import ModelGroup
from headrace.services.runtime.clock import SystemClock
from headrace.services.runtime.errors import InvalidArgument, ResourceExhausted
from headrace.services.runtime.health import Health
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.server import ServiceServer, open_channel
from headrace.services.runtime.settings import ListenSettings, RpcSettings
from headrace.services.worker.signing import UNSIGNED
from headrace.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc, inference_pb2
from tests.services.encoder.test_cache import CONFIG, ROW_BYTES, TOWER

GROUP = ModelGroup(b"m" * 32, b"l" * 32, b"r" * 32, 32, 512)
SECRET = b"0123456789abcdef"
ACME, UMBRELLA = TenantKeys(SECRET, "acme"), TenantKeys(SECRET, "umbrella")
PATIENCE_S = 120.0


@dataclass(eq=False)
class FakeWorkers:
    """The part of Workers that the stage uses."""

    fleet: Fleet = field(default_factory=lambda: Fleet(RankNumbers()))
    stubs: dict[RankId, encoder_pb2_grpc.EncoderServiceAsyncStub] = field(default_factory=dict)
    errands: list[asyncio.Task[None]] = field(default_factory=list)

    def encoder(self, rank: RankId) -> encoder_pb2_grpc.EncoderServiceAsyncStub:
        return self.stubs[rank]

    def spawn(self, work: Any) -> None:
        self.errands.append(asyncio.ensure_future(work))


class Site:
    """Some encoders, and the stage that sends images to them."""

    def __init__(self) -> None:
        self.workers = FakeWorkers()
        self.balancer = CachedImages(self.workers.fleet)
        peer = common_pb2.PeerId(replica_id="router", incarnation="1")
        self.stage = ImageStage(self.workers, self.balancer, CONFIG, peer, SystemClock())  # type: ignore[arg-type]
        self.encoders: dict[RankId, ImageEncoder] = {}
        self.caches: dict[RankId, EmbeddingCache] = {}
        self._requests = 0

    async def add(self, name: str, stack: AsyncExitStack, pending: int = 8) -> None:
        rank = RankId(name, "1")
        cache = self.caches[rank] = EmbeddingCache(256, ROW_BYTES, pending, 30.0, SystemClock())
        encoder = self.encoders[rank] = ImageEncoder(TOWER, cache, ImageLimits())
        stack.push_async_callback(encoder.close)
        identity = EncoderIdentity(common_pb2.PeerId(replica_id=name, incarnation="1"), "", GROUP.model_fp, "float32")
        unused: Any = None
        servicer = EncoderServicer(identity, cache, encoder, unused, lease_s=30.0, max_images=4, signer=UNSIGNED)
        server = ServiceServer(ListenSettings(), RpcSettings(), Metrics(), Health())
        server.add(
            encoder_pb2_grpc.add_EncoderServiceServicer_to_server,
            servicer,
            encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"],
        )
        await server.start()
        stack.push_async_callback(server.stop, 0.1)
        channel = open_channel(server.address, RpcSettings())
        stack.push_async_callback(channel.close)
        self.workers.stubs[rank] = encoder_pb2_grpc.EncoderServiceStub(channel)
        self.workers.fleet.put(name, "1", [Candidate(rank, Role.ENCODER, "dc", "host", 0, 0, 1, 0)])

    @asynccontextmanager
    async def leased(self, tenant: TenantKeys, *images: bytes) -> AsyncIterator[EncodedImages]:
        self._requests += 1
        prepared = Prepared(
            request_id=f"r{self._requests}",
            name=f"r{self._requests}",
            token_ids=(1,),
            images=tuple(inference_pb2.Image(data=data) for data in images),
            sampling=common_pb2.SamplingParams(),
            stop=common_pb2.StopParams(),
            traffic_class=common_pb2.TRAFFIC_CLASS_CHAT,
            priority=0,
            timeout_s=PATIENCE_S,
            snapshot_at=(),
            report=False,
        )
        deadline = SystemClock().monotonic() + PATIENCE_S
        async with self.stage.leased(prepared, tenant, GROUP, deadline) as encoded:
            yield encoded

    async def encode(self, tenant: TenantKeys, *images: bytes) -> EncodedImages:
        async with self.leased(tenant, *images) as encoded:
            return encoded

    async def settle(self) -> None:
        """Everything is given back (L11)."""
        await asyncio.gather(*self.workers.errands)
        assert self.workers.fleet.idle
        assert all(cache.leases == 0 and cache.integrity() == () for cache in self.caches.values())


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        made = Site()
        for name in ("e0", "e1", "e2"):
            await made.add(name, stack)
        yield made
        await made.settle()


def picture(shade: int) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (30, 24), (shade, 2 * shade % 256, 9)).save(buffer, format="PNG")
    return buffer.getvalue()


def rank_of(encoded: EncodedImages) -> RankId:
    assert encoded.encoder is not None
    return encoded.encoder.id


async def test_the_second_request_with_an_image_goes_to_the_encoder_that_has_it(site: Site) -> None:
    """Others come in between, which would have sent it elsewhere by load."""
    first = await site.encode(ACME, picture(1))
    assert first.cached == 0
    others = [await site.encode(ACME, picture(shade)) for shade in range(2, 10)]
    assert len({rank_of(other) for other in others}) == 3
    again = await site.encode(ACME, picture(1))
    assert rank_of(again) == rank_of(first)
    assert again.cached == 1
    assert sum(encoder.encoded for encoder in site.encoders.values()) <= 9


async def test_identical_images_of_one_burst_meet(site: Site) -> None:
    """L22: they are sent before the first answer is there; the tower runs once."""
    answers = await asyncio.gather(*(site.encode(ACME, picture(1)) for _ in range(8)))
    assert len({rank_of(answer) for answer in answers}) == 1
    assert sorted(answer.cached for answer in answers) == [0] + [1] * 7
    entries = site.caches[rank_of(answers[0])]._entries.values()
    await asyncio.gather(*(asyncio.shield(entry.ready) for entry in entries))
    assert sum(encoder.encoded for encoder in site.encoders.values()) == 1


async def test_tenants_do_not_share(site: Site) -> None:
    """L25: the same file of another tenant is computed anew, wherever it goes, and its key here is another one."""
    ours = await site.encode(ACME, picture(1))
    theirs = await site.encode(UMBRELLA, picture(1))
    assert (ours.cached, theirs.cached) == (0, 0)
    assert (await site.encode(UMBRELLA, picture(1))).cached == 1
    assert site.balancer.remembered == 2


async def test_a_bad_image_leaves_no_load_and_no_belief(site: Site) -> None:
    """L10, L13."""
    with pytest.raises(InvalidArgument, match="not an image"):
        await site.encode(ACME, b"no image")
    assert site.balancer.remembered == 0


async def test_a_full_encoder_sends_the_request_to_the_next_one() -> None:
    """L12, L23: the encoder that has room takes it; when none has, the client hears so."""
    async with AsyncExitStack() as stack:
        site = Site()
        for name in ("e0", "e1"):
            await site.add(name, stack, pending=0)
        with pytest.raises(ResourceExhausted, match="wait to be encoded"):
            await site.encode(ACME, picture(1))
        await site.add("e2", stack)
        assert rank_of(await site.encode(ACME, picture(1))).replica_id == "e2"
        await site.settle()


async def test_an_encoder_that_left_between_two_renewals_is_gone() -> None:
    """L6: its channel is closed then, and prefill may be waiting for the embeddings."""
    channel = open_channel("127.0.0.1:1", RpcSettings())
    stub, gone = encoder_pb2_grpc.EncoderServiceStub(channel), asyncio.Event()
    await channel.close()
    async with asyncio.timeout(PATIENCE_S):
        await _renew(stub, ["lease"], 0.001, gone)
    assert gone.is_set()
    await _release(stub, ["lease"])


async def test_the_load_ends_when_prefill_has_the_embeddings(site: Site) -> None:
    """A long answer keeps its leases, and no place in the tower's queue."""
    async with site.leased(ACME, picture(1), picture(2)) as encoded:
        assert site.workers.fleet.own(rank_of(encoded)).tokens == sum(image.tokens for image in encoded.images)
        encoded.settle()
        assert site.workers.fleet.own(rank_of(encoded)).tokens == 0
        assert site.caches[rank_of(encoded)].leases == 2
        encoded.settle()
