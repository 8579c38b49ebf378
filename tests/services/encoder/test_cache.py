"""services.encoder.cache and encode: one computation per picture and tenant, leases, eviction, integrity."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.vision.config import VisionConfig
from headrace.engine.vision.geometry import ImagePlan
from headrace.engine.vision.preprocess import ImageLimits
from headrace.engine.vision.tower import VisionTower
from headrace.services.encoder.cache import EmbeddingCache
from headrace.services.encoder.encode import ImageEncoder
from headrace.services.runtime.clock import ManualClock
from headrace.services.runtime.errors import HeadraceError, InvalidArgument, NotFound, ResourceExhausted, Unimplemented
from headrace.services.runtime.images import cache_key, content_digest
from headrace.v1 import common_pb2, inference_pb2

CONFIG = VisionConfig(1, 32, 2, 64, 4, 10000.0, 3, 64, 144, None, 16)
ROW_BYTES = CONFIG.text_hidden_size * 4


def tower() -> VisionTower:
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "vision.patch_embed.proj.weight": (32, 48),
        "vision.patch_embed.proj.bias": (32,),
        "vision.norm.weight": (32,),
        "vision.blocks.0.norm1.weight": (32,),
        "vision.blocks.0.norm2.weight": (32,),
        "vision.blocks.0.attn.wqkv.weight": (96, 32),
        "vision.blocks.0.attn.wqkv.bias": (96,),
        "vision.blocks.0.attn.wo.weight": (32, 32),
        "vision.blocks.0.attn.wo.bias": (32,),
        "vision.blocks.0.mlp.w1.weight": (128, 32),
        "vision.blocks.0.mlp.w2.weight": (32, 64),
        "aligner.w1.weight": (16, 288),
        "aligner.w1.bias": (16,),
        "aligner.w2.weight": (16, 16),
        "aligner.w2.bias": (16,),
        "image_start": (16,),
        "image_newline": (16,),
        "image_end": (16,),
    }
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    return VisionTower(CONFIG, weights, torch.float32, torch.device("cpu"))


TOWER = tower()


def picture(shade: int = 0) -> inference_pb2.Image:
    buffer = io.BytesIO()
    pixels = (np.arange(16 * 16 * 3).reshape(16, 16, 3) + shade) % 256
    PIL.Image.fromarray(pixels.astype(np.uint8)).save(buffer, format="PNG")
    return inference_pb2.Image(data=buffer.getvalue())


def cache(rows: int = 64, pending: int = 8) -> tuple[EmbeddingCache, ManualClock]:
    clock = ManualClock()
    return EmbeddingCache(rows, ROW_BYTES, pending, 10.0, clock), clock


async def test_identical_images_in_flight_are_encoded_once() -> None:
    embeddings, _ = cache()
    encoder = ImageEncoder(TOWER, embeddings, ImageLimits())
    asked = [encoder.request(picture(), b"k" * 32, "images[0]") for _ in range(5)]
    assert [cached for _, _, cached in asked] == [False, True, True, True, True]
    await asyncio.gather(*(asyncio.shield(entry.ready) for entry, _, _ in asked))
    assert encoder.encoded == 1
    entry = asked[0][0]
    plan = entry.planned.result()
    assert isinstance(plan, ImagePlan)
    assert len(entry.rows) == plan.num_tokens
    rows = embeddings.memory[list(entry.rows)].view(torch.float32)
    assert torch.equal(rows[0], TOWER._delimiters[0])
    await encoder.close()
    assert embeddings.integrity() == ()


async def test_tenants_never_share_an_embedding() -> None:
    """L25: nothing is shared beyond a tenant, not even in flight."""
    embeddings, _ = cache()
    encoder = ImageEncoder(TOWER, embeddings, ImageLimits())
    one, digest, _ = encoder.request(picture(), b"a" * 32, "i")
    two, same, cached = encoder.request(picture(), b"b" * 32, "i")
    assert digest == same
    assert not cached
    assert one is not two
    await asyncio.gather(asyncio.shield(one.ready), asyncio.shield(two.ready))
    assert encoder.encoded == 2
    await encoder.close()


def test_the_digest_covers_content_and_options() -> None:
    """L2: a picture resized otherwise is another picture."""
    resize = common_pb2.ResizeOptions(max_image_tokens=20)
    digests = {content_digest(b"a", None), content_digest(b"b", None), content_digest(b"a", resize)}
    assert len(digests) == 3
    assert len({cache_key(b"a" * 32, digest) for digest in digests}) == 3


@pytest.mark.parametrize(
    ("image", "error"),
    [
        (inference_pb2.Image(), InvalidArgument),
        (inference_pb2.Image(url="https://example.com/x.png"), Unimplemented),
        (inference_pb2.Image(data=b"x" * 2000), InvalidArgument),
        (inference_pb2.Image(data=b"x", resize=common_pb2.ResizeOptions(max_image_tokens=9999)), InvalidArgument),
    ],
)
async def test_bad_images_are_refused_before_anything_begins(
    image: inference_pb2.Image, error: type[HeadraceError]
) -> None:
    """L10."""
    embeddings, _ = cache()
    encoder = ImageEncoder(TOWER, embeddings, ImageLimits(max_bytes=1000))
    with pytest.raises(error, match=r"images\[3\]"):
        encoder.request(image, b"k" * 32, "images[3]")
    assert embeddings.pending == 0
    await encoder.close()


async def test_a_broken_image_fails_its_waiters_and_nobody_else() -> None:
    """L13."""
    embeddings, _ = cache()
    encoder = ImageEncoder(TOWER, embeddings, ImageLimits())
    bad, _, _ = encoder.request(inference_pb2.Image(data=b"no picture"), b"k" * 32, "i")
    good, _, _ = encoder.request(picture(), b"k" * 32, "i")
    embeddings.lease(bad)
    with pytest.raises(InvalidArgument, match="not an image"):
        await asyncio.shield(bad.planned)
    await asyncio.shield(good.ready)
    assert embeddings.leases == 0
    assert embeddings.integrity() == ()
    _, _, cached = encoder.request(inference_pb2.Image(data=b"no picture"), b"k" * 32, "i")
    assert not cached
    await encoder.close()


async def test_overload_is_refused_with_a_time() -> None:
    """L12."""
    embeddings, _ = cache(pending=1)
    embeddings.find_or_begin(b"one")
    with pytest.raises(ResourceExhausted) as refused:
        embeddings.find_or_begin(b"two")
    assert refused.value.retry_after_s


async def test_leases_end_by_the_clock_and_free_for_eviction() -> None:
    """L8, L9: a holder that went away costs seconds."""
    embeddings, clock = cache(rows=10)
    entry, _ = embeddings.find_or_begin(b"one")
    embeddings.place(entry, 6)
    entry.ready.set_result(0.0)
    lease = embeddings.lease(entry)
    other, _ = embeddings.find_or_begin(b"two")
    with pytest.raises(ResourceExhausted, match="leased"):
        embeddings.place(other, 6)
    clock.advance(9.0)
    assert embeddings.renew(lease)
    clock.advance(9.0)
    assert embeddings.reap() == 0
    clock.advance(1.0)
    assert embeddings.reap() == 1
    assert not embeddings.renew(lease)
    with pytest.raises(NotFound):
        embeddings.leased(lease)
    embeddings.place(other, 6)
    assert embeddings.find_or_begin(b"one")[1] is False


async def test_a_push_pins_what_it_reads() -> None:
    """L7: rows under a transfer are not evicted, lease or not."""
    embeddings, _ = cache(rows=10)
    entry, _ = embeddings.find_or_begin(b"one")
    embeddings.place(entry, 6)
    entry.ready.set_result(0.0)
    embeddings.begin_push(entry)
    other, _ = embeddings.find_or_begin(b"two")
    with pytest.raises(ResourceExhausted):
        embeddings.place(other, 6)
    embeddings.end_push(entry)
    embeddings.place(other, 6)
    with pytest.raises(RuntimeError):
        embeddings.end_push(entry)


ACTIONS = ["begin", "place", "ready", "fail", "lease", "release", "reap"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "place", "ready", "fail", "lease", "release", "reap"]), st.integers(0, 5))
    )
)
def test_any_order_keeps_the_books(steps: list[tuple[str, int]]) -> None:
    """L11: rows are free or in one entry, leases name live entries, whatever happens in whatever order."""

    async def run() -> None:
        embeddings, clock = cache(rows=12, pending=4)
        leases: list[str] = []
        for action, number in steps:
            key = bytes([number])
            try:
                entry, _ = embeddings.find_or_begin(key)
                if action == "place" and not entry.rows:
                    embeddings.place(entry, 1 + number)
                elif action == "ready" and entry.rows and not entry.ready.done():
                    entry.ready.set_result(0.0)
                elif action == "fail" and not entry.ready.done():
                    embeddings.fail(entry, NotFound("x"))
                elif action == "lease":
                    leases.append(embeddings.lease(entry))
                elif action == "release" and leases:
                    embeddings.release(leases.pop(number % len(leases)))
                elif action == "reap":
                    clock.advance(4.0)
                    embeddings.reap()
            except ResourceExhausted:
                pass
            assert embeddings.integrity() == ()
            assert sum(embeddings.counts()) == embeddings.num_rows

    asyncio.run(run())
