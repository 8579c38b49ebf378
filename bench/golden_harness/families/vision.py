"""Image geometry, pixels, patches, tower and aligner (spec §14), through engine/vision."""

from __future__ import annotations

import torch

from bench.golden_harness.case import Case, Tensors
from bench.golden_harness.registry import runner
from headrace.engine.vision.config import VisionConfig
from headrace.engine.vision.geometry import plan_image
from headrace.engine.vision.preprocess import normalise, patchify
from headrace.engine.vision.tower import VisionTower, rope_tables


@runner("vision")
def run(case: Case) -> Tensors:
    if "plan" in case.outputs:
        return {"plan": _plans(case)}
    if "bf16" in case.outputs:
        return {"bf16": normalise(torch.arange(256, dtype=torch.uint8))}
    if "pixels" in case.inputs:
        return {"patches": patchify(case.input("pixels"), case.integer("patch"))}
    return _tower(case)


def _plans(case: Case) -> torch.Tensor:
    """Columns: rows and columns of IMAGE tokens, height and width in pixels, patch rows and columns, tokens."""
    config = VisionConfig(
        num_layers=1,
        hidden_size=4,
        num_heads=1,
        intermediate_size=4,
        patch_size=case.integer("vision_patch_size"),
        rope_theta=10000.0,
        downsample_ratio=case.integer("vision_downsample_ratio"),
        max_image_tokens=case.integer("vision_max_n_token"),
        min_pixels=case.integer("vision_min_pixels"),
        max_wh_ratio=case.config["vision_max_wh_ratio"],
        text_hidden_size=4,
    )
    plans = [plan_image(width, height, config) for width, height in case.input("size_wh").tolist()]
    return torch.tensor(
        [
            [plan.rows, plan.columns, plan.height, plan.width, plan.patch_rows, plan.patch_columns, plan.num_tokens]
            for plan in plans
        ]
    )


def _tower(case: Case) -> Tensors:
    rows, columns = case.config["grid_hw"]
    config = VisionConfig(
        num_layers=case.integer("layers"),
        hidden_size=case.integer("dim"),
        num_heads=case.integer("heads"),
        intermediate_size=case.integer("inter"),
        patch_size=case.integer("patch"),
        rope_theta=case.number("theta"),
        downsample_ratio=case.integer("downsample_ratio", 3),
        max_image_tokens=1024,
        min_pixels=1,
        max_wh_ratio=None,
        text_hidden_size=case.integer("llm_dim"),
        norm_eps=case.number("eps"),
    )
    cos, sin = rope_tables(rows, columns, config)
    outputs = {"rope_cos": cos, "rope_sin": sin}
    weights = {name: case.weight(name) for name in case.weights}
    for dtype, suffix in ((torch.float32, ""), (torch.bfloat16, "_bf16")):
        tower = VisionTower(config, weights, dtype, torch.device("cpu"))
        features = tower.features(case.input("patches"), rows, columns)
        outputs[f"features{suffix}"] = features
        outputs[f"embeds{suffix}"] = tower.align(features, rows, columns)
    return outputs
