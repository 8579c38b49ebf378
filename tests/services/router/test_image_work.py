"""What images will cost, from their headers, and the keys of their embeddings."""

from __future__ import annotations

import io

import PIL.Image
import pytest

from headrace.engine.vision.config import VisionConfig
from headrace.engine.vision.preprocess import ImageLimits, preprocess
from headrace.services.router.image_work import INLINE_BYTES, UNKNOWN_TOKENS, describe, described, image_tokens
from headrace.services.router.tenants import TenantKeys
from headrace.v1 import common_pb2, inference_pb2

VISION = VisionConfig(1, 32, 2, 64, 4, 10000.0, 3, 64, 144, None, 16)
SECRET = b"0123456789abcdef"


def image(width: int, height: int, form: str = "PNG", noise: int = 0) -> inference_pb2.Image:
    buffer = io.BytesIO()
    picture = PIL.Image.effect_noise((width, height), noise) if noise else PIL.Image.new("L", (width, height))
    picture.convert("RGB").save(buffer, format=form)
    return inference_pb2.Image(data=buffer.getvalue())


@pytest.mark.parametrize("size", [(16, 16), (90, 60), (300, 20), (5, 5)])
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_the_estimate_is_what_the_encoder_will_say(size: tuple[int, int], form: str) -> None:
    sent = image(*size, form=form)
    _, plan = preprocess(sent.data, VISION, ImageLimits())
    assert image_tokens(sent, VISION) == plan.num_tokens


def test_resize_options_count() -> None:
    sent = image(400, 400)
    sent.resize.max_image_tokens = 20
    assert image_tokens(sent, VISION) <= 20 < image_tokens(image(400, 400), VISION)


@pytest.mark.parametrize("data", [b"", b"no image", image(90, 60).data[:20]])
def test_what_cannot_be_read_is_left_to_the_encoder(data: bytes) -> None:
    """L13: a broken file has a flat estimate and is no error here."""
    assert image_tokens(inference_pb2.Image(data=data), VISION) == 64
    assert image_tokens(inference_pb2.Image(data=data), None) == UNKNOWN_TOKENS


def test_options_out_of_range_are_left_to_the_encoder() -> None:
    sent = image(90, 60)
    sent.resize.CopyFrom(common_pb2.ResizeOptions(max_image_tokens=10_000))
    assert image_tokens(sent, VISION) == 64


async def test_keys_are_the_tenants_and_the_contents() -> None:
    """L25: equal files of one tenant meet, those of two tenants do not; other bytes or options are other pictures."""
    acme, umbrella = TenantKeys(SECRET, "acme").image_key, TenantKeys(SECRET, "umbrella").image_key
    first, again, other, resized = image(90, 60), image(90, 60), image(90, 61), image(90, 60)
    resized.resize.max_image_tokens = 20
    keys = [work.key for work in describe([first, again, other, resized], acme, VISION)]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert keys[0] != describe([first], umbrella, VISION)[0].key
    large = image(400, 400, form="BMP", noise=50)
    assert len(large.data) > INLINE_BYTES
    assert await described([large, first], acme, VISION) == describe([large, first], acme, VISION)
