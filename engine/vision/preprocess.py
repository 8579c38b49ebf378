"""Encoded image bytes to patches (spec §14), with limits that hold before anything is decoded.

Pillow decodes. A file's header gives its size in pixels first; a picture over the limit is refused before its pixels
are unpacked, so that a decompression bomb costs nothing (L13, L26).
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch

from headrace.engine.vision.config import VisionConfig, VisionError
from headrace.engine.vision.geometry import ImagePlan, plan_image

GREY = 127
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats that are tried; Pillow's others are not reachable from a request."""


@dataclass(frozen=True)
class ImageLimits:
    """Bounds of one image, refused beyond."""

    max_bytes: int = 20 * 1024 * 1024
    max_pixels: int = 64_000_000


def open_image(data: bytes, limits: ImageLimits) -> PIL.Image.Image:
    """Decode to RGB, EXIF orientation applied, transparency on white. Raises VisionError for anything unusable."""
    if not data:
        raise VisionError("the image is empty")
    if len(data) > limits.max_bytes:
        raise VisionError(f"the image has {len(data)} bytes; at most {limits.max_bytes} are taken")
    try:
        image: PIL.Image.Image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
        pixels = image.width * image.height
        if pixels > limits.max_pixels:
            raise VisionError(f"the image has {pixels} pixels; at most {limits.max_pixels} are taken")
        image.load()
        image = PIL.ImageOps.exif_transpose(image)
    except PIL.UnidentifiedImageError:
        raise VisionError(f"not an image that can be read; send one of {', '.join(FORMATS)}") from None
    except (OSError, SyntaxError, ValueError, EOFError, PIL.Image.DecompressionBombError) as error:
        if isinstance(error, VisionError):
            raise
        raise VisionError(f"the image is broken: {error}") from error
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = PIL.Image.alpha_composite(white, image)
    return image.convert("RGB")


def fit_image(image: PIL.Image.Image, plan: ImagePlan) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    """The picture inside its plan, aspect kept, centred on grey (or stretched): [height, width, 3] uint8."""
    if plan.stretched:
        return np.asarray(image.resize((plan.width, plan.height), PIL.Image.Resampling.BICUBIC))
    fitted = PIL.ImageOps.contain(image, (plan.width, plan.height), PIL.Image.Resampling.BICUBIC)
    canvas = PIL.Image.new("RGB", (plan.width, plan.height), (GREY, GREY, GREY))
    canvas.paste(fitted, (round((plan.width - fitted.width) * 0.5), round((plan.height - fitted.height) * 0.5)))
    return np.asarray(canvas)


def normalise(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 → (v/255 − 0.5)/0.5 in float32, rounded to bfloat16."""
    return ((pixels.to(torch.float32) / 255 - 0.5) / 0.5).to(torch.bfloat16)


def patchify(pixels: torch.Tensor, patch: int) -> torch.Tensor:
    """[H, W, 3] uint8 → [(H/patch)·(W/patch), 3, patch, patch] bfloat16, patches in reading order."""
    height, width, channels = pixels.shape
    grid = normalise(pixels).reshape(height // patch, patch, width // patch, patch, channels)
    return grid.permute(0, 2, 4, 1, 3).reshape(-1, channels, patch, patch).contiguous()


def preprocess(data: bytes, config: VisionConfig, limits: ImageLimits) -> tuple[torch.Tensor, ImagePlan]:
    """Encoded bytes → (patches [n, 3, p, p] bfloat16, plan). Raises VisionError."""
    image = open_image(data, limits)
    plan = plan_image(image.width, image.height, config)
    pixels = torch.from_numpy(np.array(fit_image(image, plan)))
    return patchify(pixels, config.patch_size), plan
