"""What a request's images will cost an encoder, from a look at their files: keys of embeddings, and tokens.

The size stands in a file's header; nothing is unpacked here (L26). A file that cannot be read gets a flat estimate: its
encoder says what is wrong with it.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence

import PIL.Image

from headrace.engine.vision.config import VisionConfig, VisionError
from headrace.engine.vision.geometry import plan_image
from headrace.router.balancers.base import ImageWork
from headrace.services.runtime.errors import InvalidArgument
from headrace.services.runtime.images import cache_key, content_digest, resized_config
from headrace.v1 import inference_pb2

UNKNOWN_TOKENS = 1024
"""Of an image whose size cannot be told."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Those that encoders take."""
INLINE_BYTES = 64 * 1024
"""A request's images up to this size are hashed where the event loop runs: about 0.1 ms."""


def image_tokens(image: inference_pb2.Image, vision: VisionConfig | None) -> int:
    """Length of the image's span, by its header; orientation marks are not looked at."""
    if vision is None:
        return UNKNOWN_TOKENS
    try:
        config = resized_config(vision, image.resize, "resize") if image.HasField("resize") else vision
        with PIL.Image.open(io.BytesIO(image.data), formats=FORMATS) as picture:
            return plan_image(picture.width, picture.height, config).num_tokens
    except (OSError, SyntaxError, ValueError, EOFError, PIL.Image.DecompressionBombError, VisionError, InvalidArgument):
        return min(UNKNOWN_TOKENS, vision.max_image_tokens)


def describe(
    images: Sequence[inference_pb2.Image], image_key: bytes, vision: VisionConfig | None
) -> tuple[ImageWork, ...]:
    """One per image, in order. `image_key`: the tenant's (L25)."""
    return tuple(
        ImageWork(
            cache_key(image_key, content_digest(image.data, image.resize if image.HasField("resize") else None)),
            image_tokens(image, vision),
        )
        for image in images
    )


async def described(
    images: Sequence[inference_pb2.Image], image_key: bytes, vision: VisionConfig | None
) -> tuple[ImageWork, ...]:
    """The same, large images on a thread: hashing 20 MB takes 10 to 60 ms."""
    if sum(len(image.data) for image in images) <= INLINE_BYTES:
        return describe(images, image_key, vision)
    return await asyncio.to_thread(describe, images, image_key, vision)
