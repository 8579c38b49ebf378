"""The V4.1 vision tower and aligner (spec §14): patches of one image → rows for its IMAGE tokens.

The tower runs one image at a time with full attention inside it, so a row never depends on what else is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from headrace.engine.vision.config import VisionConfig, VisionError
from headrace.engine.vision.geometry import ImagePlan


def rope_tables(rows: int, columns: int, config: VisionConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [rows·columns, head_dim/2] float32: first quarter of the head by row, second by column."""
    quarter = config.head_dim // 4
    exponent = torch.arange(quarter, dtype=torch.float32) * 2 / (config.head_dim // 2)
    frequencies = 1.0 / config.rope_theta**exponent
    row = torch.arange(rows, dtype=torch.float32).repeat_interleave(columns)
    column = torch.arange(columns, dtype=torch.float32).repeat(rows)
    angles = torch.cat([row[:, None] * frequencies, column[:, None] * frequencies], dim=-1)
    return angles.cos(), angles.sin()


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [tokens, heads, head_dim], channel c paired with c + head_dim/2, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class VisionTower:
    """Weights and the forward pass. dtype float32 for exactness, bfloat16 as published."""

    def __init__(
        self, config: VisionConfig, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`weights` by checkpoint name (vision.…, aligner.…, image_start …). Raises VisionError for a missing one."""
        self.config = config
        self.dtype = dtype
        self.device = device
        self._weights = {}
        for name in _weight_names(config):
            if name not in weights:
                raise VisionError(f"the checkpoint has no {name}")
            self._weights[name] = weights[name].to(device=device, dtype=dtype)
        delimiters = [weights.get(f"image_{name}") for name in ("start", "newline", "end")]
        self._delimiters = [row.to(device=device, dtype=dtype) for row in delimiters if row is not None]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return (x32 * scale * self._weights[f"{name}.weight"].float()).to(x.dtype)

    def features(self, patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[rows·columns, 3, p, p] patches → [rows·columns, hidden] features after the final norm."""
        config = self.config
        cos, sin = (table.to(self.device) for table in rope_tables(rows, columns, config))
        x = self._linear(patches.to(device=self.device, dtype=self.dtype).flatten(1), "vision.patch_embed.proj")
        for index in range(config.num_layers):
            name = f"vision.blocks.{index}"
            q, k, v = (
                part.reshape(-1, config.num_heads, config.head_dim)
                for part in self._linear(self._norm(x, f"{name}.norm1"), f"{name}.attn.wqkv").chunk(3, dim=-1)
            )
            q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
            heads = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
            x = x + self._linear(heads.transpose(0, 1).flatten(1), f"{name}.attn.wo")
            gate, up = self._linear(self._norm(x, f"{name}.norm2"), f"{name}.mlp.w1").chunk(2, dim=-1)
            x = x + self._linear(F.silu(gate) * up, f"{name}.mlp.w2")
        return self._norm(x, "vision.norm")

    def align(self, features: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[rows·columns, hidden] → [⌈rows/m⌉·⌈columns/m⌉, text hidden].

        A cell is channel-major: index = channel·m² + row·m + column.
        """
        merge = self.config.downsample_ratio
        grid = features.reshape(rows, columns, -1).permute(2, 0, 1)
        grid = F.pad(grid, (0, -columns % merge, 0, -rows % merge))
        hidden, height, width = grid.shape
        cells = grid.reshape(hidden, height // merge, merge, width // merge, merge).permute(1, 3, 0, 2, 4)
        x = self._linear(cells.reshape(-1, hidden * merge * merge), "aligner.w1")
        return self._linear(F.gelu(x), "aligner.w2")

    def encode(self, patches: torch.Tensor, plan: ImagePlan) -> torch.Tensor:
        """Rows of the whole span, delimiters included: [plan.num_tokens, text hidden]."""
        if len(self._delimiters) != 3:
            raise VisionError("the checkpoint has no image_start, image_newline and image_end")
        start, newline, end = self._delimiters
        image = self.align(
            self.features(patches, plan.patch_rows, plan.patch_columns), plan.patch_rows, plan.patch_columns
        )
        lines = image.reshape(plan.rows, plan.columns, -1)
        lines = torch.cat([lines, newline.expand(plan.rows, 1, -1)], dim=1).flatten(0, 1)
        return torch.cat([start[None], lines, end[None]])


def _weight_names(config: VisionConfig) -> list[str]:
    names = ["vision.patch_embed.proj.weight", "vision.patch_embed.proj.bias", "vision.norm.weight"]
    for index in range(config.num_layers):
        block = f"vision.blocks.{index}"
        names += [f"{block}.norm1.weight", f"{block}.norm2.weight", f"{block}.mlp.w1.weight", f"{block}.mlp.w2.weight"]
        names += [f"{block}.attn.{part}" for part in ("wqkv.weight", "wqkv.bias", "wo.weight", "wo.bias")]
    return names + [f"aligner.{part}" for part in ("w1.weight", "w1.bias", "w2.weight", "w2.bias")]
