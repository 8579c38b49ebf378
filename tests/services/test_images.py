"""An image through encoder, prefill and decode: embeddings by transfer, tokens of one process."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import grpc.aio
import PIL.Image
import pytest
import torch

from headrace.engine.request import EngineRequest, ImageInput, RequestKey
from headrace.engine.vision.loading import load_vision_tower
from headrace.engine.vision.preprocess import ImageLimits, preprocess
from headrace.services.runtime.errors import Incompatible, InvalidArgument, NotFound, from_rpc_error
from headrace.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc, inference_pb2
from tests.services.cluster import PATIENCE_S, Cluster
from tests.services.conftest import Offline
from tests.services.driver import Driver, make_request, prompt_of, spec_of

pytestmark = pytest.mark.asyncio(loop_scope="session")
IMAGE_TOKEN = 399


def picture(colour: tuple[int, int, int]) -> bytes:
    image = PIL.Image.new("RGB", (90, 60), colour)
    image.paste((255 - colour[0], 20, 200), (10, 5, 50, 40))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


async def encode(cluster: Cluster, name: str, *pictures: bytes) -> encoder_pb2.EncodeResponse:
    worker = cluster["encoder"]
    return await encoder_pb2_grpc.EncoderServiceStub(worker.channel).Encode(
        encoder_pb2.EncodeRequest(
            id=common_pb2.AttemptId(request_id=name, attempt=1),
            model=common_pb2.ModelIdentity(model_fingerprint=worker.replica.model_fp),
            images=[inference_pb2.Image(data=data) for data in pictures],
            image_key=bytes(32),
            time_left_ms=60_000,
        ),
        timeout=PATIENCE_S,
    )


def with_images(name: str, encoded: encoder_pb2.EncodeResponse) -> EngineRequest:
    """Text, then each image, then text."""
    ids = list(prompt_of(name, 21))
    images = []
    for image in encoded.images:
        images.append(ImageInput(len(ids), image.tokens, image.content_digest))
        ids += [IMAGE_TOKEN] * image.tokens
        ids += prompt_of(f"after {image.content_digest.hex()}", 6)
    return make_request(name, ids, images=tuple(images))


def embedded(request: EngineRequest, folder: Path, *pictures: bytes, attempt: int = 1) -> EngineRequest:
    """The same with embeddings computed here."""
    tower = load_vision_tower(folder, dtype=torch.float32, device=torch.device("cpu"))
    images = []
    for image, data in zip(request.images, pictures, strict=True):
        patches, plan = preprocess(data, tower.config, ImageLimits(1 << 20, 1 << 20))
        with torch.inference_mode():
            images.append(replace(image, embeddings=tower.encode(patches, plan)))
    return replace(request, key=RequestKey(f"{request.key.request_id}-here", attempt), images=tuple(images))


async def release(cluster: Cluster, encoded: encoder_pb2.EncodeResponse) -> None:
    leases = [image.handle.lease_id for image in encoded.images]
    await encoder_pb2_grpc.EncoderServiceStub(cluster["encoder"].channel).Release(
        encoder_pb2.EncoderServiceReleaseRequest(lease_ids=leases), timeout=PATIENCE_S
    )


async def test_two_images_give_the_tokens_of_one_process(
    v41: Driver, v41_cluster: Cluster, v41_offline: Offline, v41_folder: Path
) -> None:
    """L5: embeddings that came by transfer, verified, equal those computed in place."""
    pictures = picture((200, 30, 30)), picture((10, 220, 90))
    encoded = await encode(v41_cluster, "images", *pictures)
    request = with_images("images", encoded)
    answer = await v41.generate(request, embeddings=[image.handle for image in encoded.images])
    assert answer.tokens == v41_offline.tokens(embedded(request, v41_folder, *pictures))
    other = embedded(request, v41_folder, pictures[1], pictures[0], attempt=2)
    assert answer.tokens != v41_offline.tokens(other), "the images must matter"
    report = answer.report
    assert report.usage.image_tokens == sum(image.tokens for image in encoded.images)
    assert report.prefill.embedding_bytes == sum(image.handle.rows * image.handle.row_bytes for image in encoded.images)
    await release(v41_cluster, encoded)


@pytest.mark.parametrize("damage", ["stale lease", "other life", "rows", "row size", "missing"])
async def test_wrong_embeddings_are_refused(v41: Driver, v41_cluster: Cluster, damage: str) -> None:
    """L1, L10: refused before anything runs; the reservation's rows come free."""
    encoded = await encode(v41_cluster, f"wrong-{damage}", picture((1, 2, 3)))
    request = with_images(f"wrong-{damage}".replace(" ", "-"), encoded)
    handle = encoder_pb2.EmbeddingHandle()
    handle.CopyFrom(encoded.images[0].handle)
    expected: type[Exception] = NotFound
    if damage == "stale lease":
        await release(v41_cluster, encoded)
    elif damage == "other life":
        handle.owner.incarnation = "0" * 32
    elif damage == "rows":
        handle.rows, expected = handle.rows - 1, InvalidArgument
    elif damage == "row size":
        handle.row_bytes, expected = handle.row_bytes // 2, Incompatible
    else:
        expected = InvalidArgument
    spec = spec_of(request, v41.decode)
    reserved = await v41.reserve(spec)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in v41.run(spec, reserved, [] if damage == "missing" else [handle]):
            pass
    assert isinstance(from_rpc_error(caught.value), expected)
    await v41.release(spec.id)
    await release(v41_cluster, encoded)
