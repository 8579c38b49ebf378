"""The vision encoder: geometry invariants, limits and broken files, span assembly."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.vision.config import VisionConfig, VisionError, vision_config
from headrace.engine.vision.geometry import plan_image
from headrace.engine.vision.preprocess import GREY, ImageLimits, fit_image, open_image, patchify, preprocess
from headrace.engine.vision.tower import VisionTower, rope_tables, rotate_halves

TINY = VisionConfig(
    num_layers=1,
    hidden_size=32,
    num_heads=2,
    intermediate_size=64,
    patch_size=4,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=64,
    min_pixels=144,
    max_wh_ratio=None,
    text_hidden_size=16,
)
FULL = VisionConfig(32, 1024, 16, 2816, 14, 10000.0, 3, 1024, 295936, None, 5120)


def picture(width: int, height: int, form: str = "PNG", **options: object) -> bytes:
    gradient = np.arange(width * height * 3, dtype=np.uint32).reshape(height, width, 3) % 251
    buffer = io.BytesIO()
    PIL.Image.fromarray(gradient.astype(np.uint8)).save(buffer, format=form, **options)
    return buffer.getvalue()


def tower(config: VisionConfig = TINY) -> VisionTower:
    generator = torch.Generator().manual_seed(7)
    d, f, p, m = config.hidden_size, config.intermediate_size, config.patch_size, config.downsample_ratio
    t = config.text_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (d, 3 * p * p),
        "vision.patch_embed.proj.bias": (d,),
        "vision.norm.weight": (d,),
        "aligner.w1.weight": (t, d * m * m),
        "aligner.w1.bias": (t,),
        "aligner.w2.weight": (t, t),
        "aligner.w2.bias": (t,),
        "image_start": (t,),
        "image_newline": (t,),
        "image_end": (t,),
    }
    for index in range(config.num_layers):
        block = f"vision.blocks.{index}"
        shapes |= {
            f"{block}.norm1.weight": (d,),
            f"{block}.norm2.weight": (d,),
            f"{block}.attn.wqkv.weight": (3 * d, d),
            f"{block}.attn.wqkv.bias": (3 * d,),
            f"{block}.attn.wo.weight": (d, d),
            f"{block}.attn.wo.bias": (d,),
            f"{block}.mlp.w1.weight": (2 * f, d),
            f"{block}.mlp.w2.weight": (d, f),
        }
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    return VisionTower(config, weights, torch.float32, torch.device("cpu"))


@settings(max_examples=200)
@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([TINY, FULL]))
def test_plans_stay_inside_the_token_limit(width: int, height: int, config: VisionConfig) -> None:
    try:
        plan = plan_image(width, height, config)
    except VisionError:
        assert max(width, height) > 100 * min(width, height) * 0.5
        return
    assert plan.num_tokens <= config.max_image_tokens
    assert plan.width == plan.patch_columns * config.patch_size
    assert plan.height == plan.patch_rows * config.patch_size
    assert plan.rows * config.downsample_ratio >= plan.patch_rows > (plan.rows - 1) * config.downsample_ratio


def test_picture_is_padded_with_grey_and_stretched_beyond_the_ratio() -> None:
    image = open_image(picture(24, 6), ImageLimits())
    plan = plan_image(24, 6, TINY)
    pixels = fit_image(image, plan)
    assert pixels.shape == (plan.height, plan.width, 3)
    assert (pixels[0] == GREY).all() or (pixels[-1] == GREY).all()
    wide = VisionConfig(**{**TINY.__dict__, "max_wh_ratio": 2})
    assert plan_image(24, 6, wide).stretched


def test_patches_read_line_by_line() -> None:
    pixels = torch.arange(8 * 12 * 3, dtype=torch.int64).reshape(8, 12, 3).to(torch.uint8)
    patches = patchify(pixels, 4)
    assert patches.shape == (6, 3, 4, 4)
    again = patchify(pixels[4:, 4:8], 4)
    assert torch.equal(patches[4], again[0])


def test_span_has_its_delimiters() -> None:
    model = tower()
    patches, plan = preprocess(picture(30, 20), TINY, ImageLimits())
    rows = model.encode(patches, plan)
    assert rows.shape == (plan.num_tokens, TINY.text_hidden_size)
    start, newline, end = model._delimiters
    assert torch.equal(rows[0], start)
    assert torch.equal(rows[-1], end)
    for line in range(plan.rows):
        assert torch.equal(rows[1 + line * (plan.columns + 1) + plan.columns], newline)


def test_rope_is_a_rotation() -> None:
    cos, sin = rope_tables(3, 5, TINY)
    x = torch.randn(15, 2, TINY.head_dim)
    turned = rotate_halves(x, cos, sin)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    assert torch.equal(turned[0], x[0])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"not an image at all", "not an image"),
        (picture(64, 64)[:200], "broken"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "not an image|broken"),
        (picture(64, 64) + b"", "pixels"),
        (b"x" * 5000, "bytes"),
    ],
)
def test_broken_and_oversized_files_are_refused(data: bytes, message: str) -> None:
    """L13: a broken image is a typed error, never a crash."""
    limits = ImageLimits(
        max_bytes=4096 if data[:1] == b"x" else 1 << 20, max_pixels=100 if "pixels" in message else 1 << 20
    )
    with pytest.raises(VisionError, match=message):
        open_image(data, limits)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_files_never_raise_anything_else(data: st.DataObject) -> None:
    """L13: any bytes give a picture or a VisionError."""
    base = bytearray(picture(16, 16, data.draw(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP"]))))
    for _ in range(data.draw(st.integers(0, 8))):
        base[data.draw(st.integers(0, len(base) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, len(base)))
    with contextlib.suppress(VisionError):
        preprocess(bytes(base[:cut]), TINY, ImageLimits(max_pixels=1 << 20))


def test_a_header_that_promises_a_bomb_is_refused_before_decoding() -> None:
    """L26: a picture over the limit is refused from its header."""
    bomb = picture(3000, 3000, "PNG", optimize=True)
    with pytest.raises(VisionError, match="9000000 pixels"):
        open_image(bomb, ImageLimits(max_pixels=1_000_000))


def test_transparency_becomes_white() -> None:
    buffer = io.BytesIO()
    PIL.Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(buffer, format="PNG")
    assert np.asarray(open_image(buffer.getvalue(), ImageLimits())).min() == 255


def test_config_of_text_only_models() -> None:
    assert vision_config({"model_type": "deepseek_v3"}) is None
    with pytest.raises(VisionError):
        VisionConfig(**{**TINY.__dict__, "num_heads": 5})


def test_missing_tensors_are_named() -> None:
    with pytest.raises(VisionError, match=r"vision\.patch_embed"):
        VisionTower(TINY, {}, torch.float32, torch.device("cpu"))
