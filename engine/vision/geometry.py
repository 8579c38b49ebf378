"""How many patches and tokens a picture becomes (spec §14, exact integer rules). No torch: the router may ask too."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.engine.vision.config import VisionConfig, VisionError


@dataclass(frozen=True)
class ImagePlan:
    """The resized picture and its grids.

    The span of an image is START, then `rows` times (`columns` × IMAGE, NEWLINE), then END.
    """

    height: int
    """Pixels after resizing and padding; a multiple of the patch size, as is `width`."""
    width: int
    patch_rows: int
    patch_columns: int
    rows: int
    """IMAGE tokens from top to bottom: patch rows merged by the downsample ratio."""
    columns: int
    stretched: bool
    """The picture is wider than max_wh_ratio: it is stretched to the plan instead of padded."""

    @property
    def num_tokens(self) -> int:
        return self.rows * (self.columns + 1) + 2


def plan_image(width: int, height: int, config: VisionConfig) -> ImagePlan:
    """Plan of a picture of width × height pixels. Raises VisionError for an empty one."""
    if width < 1 or height < 1:
        raise VisionError(f"a picture of {width} × {height} pixels is empty")
    patch, merge = config.patch_size, config.downsample_ratio
    w: float = width
    h: float = height
    stretched = config.max_wh_ratio is not None and w > h * config.max_wh_ratio
    if config.max_wh_ratio is not None and stretched:
        w = h * config.max_wh_ratio
    if w * h < config.min_pixels:
        scale = math.sqrt(config.min_pixels / (w * h))
        w, h = int(w * scale), int(h * scale)
    best_width = math.ceil(w / patch) * patch
    best_height = math.ceil(h / patch) * patch
    if _tokens(best_width, best_height, patch, merge) > config.max_image_tokens:
        best_width, best_height = _shrink(w, h, config)
    if best_width < 1 or best_height < 1:
        raise VisionError(f"a picture of {width} × {height} pixels is too thin for patches of {patch}")
    patch_columns, patch_rows = best_width // patch, best_height // patch
    return ImagePlan(
        height=best_height,
        width=best_width,
        patch_rows=patch_rows,
        patch_columns=patch_columns,
        rows=-(-patch_rows // merge),
        columns=-(-patch_columns // merge),
        stretched=stretched,
    )


def _tokens(width: int, height: int, patch: int, merge: int) -> int:
    return -(-(height // patch) // merge) * (-(-(width // patch) // merge) + 1) + 2


def _shrink(w: float, h: float, config: VisionConfig) -> tuple[int, int]:
    """The largest size of about the same shape whose span has at most max_image_tokens tokens, as (width, height)."""
    patch, limit = config.patch_size, config.max_image_tokens
    cell = patch * config.downsample_ratio
    shape = h / w
    columns = math.sqrt((limit - 2) / shape + 0.25) - 0.5
    rows = columns * shape
    if columns < 1:
        return cell, (limit - 2) // 2 * cell
    if rows < 1:
        return (limit - 3) * cell, cell
    scale = min(math.floor(columns) * cell / w, math.floor(rows) * cell / h)
    return math.floor(w * scale / patch) * patch, math.floor(h * scale / patch) * patch
