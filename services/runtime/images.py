"""What router, encoder and offline engine must see alike in an image: digest, cache key, bounds. No torch."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace

from headrace.engine.vision.config import VisionConfig
from headrace.services.runtime.errors import InvalidArgument
from headrace.v1 import common_pb2


def content_digest(data: bytes, resize: common_pb2.ResizeOptions | None) -> bytes:
    """SHA-256 over the file's bytes and the resize options; it enters block keys (L2)."""
    digest = hashlib.sha256(b"headrace.image.1")
    options = b"" if resize is None else resize.SerializeToString(deterministic=True)
    for part in (data, options):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def cache_key(image_key: bytes, digest: bytes) -> bytes:
    """HMAC(tenant's image key, content digest) (L25)."""
    return hmac.digest(image_key, digest, "sha256")


def resized_config(config: VisionConfig, resize: common_pb2.ResizeOptions | None, field: str) -> VisionConfig:
    """The model's geometry with a request's narrower bounds. Raises InvalidArgument for wider or senseless ones."""
    if resize is None:
        return config
    changes: dict[str, int | float] = {}
    if resize.HasField("max_image_tokens"):
        if not 5 <= resize.max_image_tokens <= config.max_image_tokens:
            raise InvalidArgument(
                f"must lie between 5 and {config.max_image_tokens}", field=f"{field}.max_image_tokens"
            )
        changes["max_image_tokens"] = resize.max_image_tokens
    if resize.HasField("min_pixels"):
        if resize.min_pixels > config.min_pixels:
            raise InvalidArgument(f"must be at most {config.min_pixels}", field=f"{field}.min_pixels")
        changes["min_pixels"] = resize.min_pixels
    if resize.HasField("max_wh_ratio"):
        if not 1 <= resize.max_wh_ratio <= 1000:
            raise InvalidArgument("must lie between 1 and 1000", field=f"{field}.max_wh_ratio")
        changes["max_wh_ratio"] = resize.max_wh_ratio
    return replace(config, **changes)  # type: ignore[arg-type]
