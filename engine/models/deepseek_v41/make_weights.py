"""Seeded tensors of a made V4.1 checkpoint, under the released names and formats (spec §2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace.engine.loading import ModelError
from headrace.engine.models.deepseek_v41.config import DraftConfig, LayerKind, V41Config
from headrace.engine.vision.config import VisionConfig, vision_config
from headrace.kernels.reference.quant import e8m0_to_float, pow2_scale_byte, quantise_fp4_index

_BLOCK = 32


def make_tensors(config: V41Config, raw: Mapping[str, object], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint: text, draft layers, vision. ``raw`` is the parsed config.json.

    Raises:
        ModelError: a size is no multiple of the 32-channel quantiser group.
    """
    made = _Maker(config, seed)
    made.bf16("embed.weight", config.vocab_size, config.hidden_size, std=1.0)
    made.bf16("head.weight", config.vocab_size, config.hidden_size)
    made.norm("norm.weight", config.hidden_size)
    for kind in config.layers:
        made.layer(f"layers.{kind.index}", kind, config.num_experts)
        if kind.engram is not None and config.engram is not None:
            made.engram(f"layers.{kind.index}.engram", config.engram.num_embeddings[kind.engram])
    if config.draft is not None:
        made.draft(config.draft)
    vision = vision_config(dict(raw))
    if vision is not None:
        made.vision(vision)
    return made.tensors


class _Maker:
    def __init__(self, config: V41Config, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._config = config
        self._random = torch.Generator().manual_seed(seed)

    def _normal(self, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random) * std + mean

    def bf16(self, name: str, *shape: int, std: float | None = None) -> None:
        """A matrix whose product keeps the size of its input, unless ``std`` says otherwise."""
        self.tensors[name] = self._normal(*shape, std=shape[-1] ** -0.5 if std is None else std).bfloat16()

    def norm(self, name: str, *shape: int) -> None:
        self.tensors[name] = self._normal(*shape, std=0.1, mean=1.0).bfloat16()

    def f32(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        self.tensors[name] = self._normal(*shape, std=std, mean=mean)

    def fp8(self, name: str, rows: int, columns: int) -> None:
        """e4m3 with one power-of-two scale per 32 × 32 block."""
        weight = self._normal(rows, columns, std=columns**-0.5)
        row_pad, column_pad = -rows % _BLOCK, -columns % _BLOCK
        padded = torch.nn.functional.pad(weight, (0, column_pad, 0, row_pad))
        blocks = padded.view(-1, _BLOCK, padded.shape[1] // _BLOCK, _BLOCK)
        byte = pow2_scale_byte(blocks.abs().amax((1, 3)).clamp_min(1e-4), 448.0)
        codes = (blocks / e8m0_to_float(byte)[:, None, :, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        self.tensors[f"{name}.weight"] = codes.view(padded.shape)[:rows, :columns].contiguous()
        self.tensors[f"{name}.scale"] = byte.view(torch.float8_e8m0fnu)

    def fp8_rows(self, name: str, rows: int, width: int) -> None:
        """e4m3 table with one scale per row and 32 channels."""
        groups = self._grouped(self._normal(rows, width, std=1.0))
        byte = pow2_scale_byte(groups.abs().amax(-1).clamp_min(1e-4), 448.0)
        codes = (groups / e8m0_to_float(byte).unsqueeze(-1)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        self.tensors[f"{name}.weight"] = codes.view(rows, width)
        self.tensors[f"{name}.scale"] = byte.view(torch.float8_e8m0fnu)

    def fp4(self, name: str, rows: int, columns: int) -> None:
        """Packed e2m1, one power-of-two scale per row and 32 input channels: the index quantiser's own format."""
        packed, byte = quantise_fp4_index(self._grouped(self._normal(rows, columns, std=columns**-0.5)).flatten(1))
        self.tensors[f"{name}.weight"] = packed.view(torch.int8)
        self.tensors[f"{name}.scale"] = byte.view(torch.float8_e8m0fnu)

    @staticmethod
    def _grouped(weight: torch.Tensor) -> torch.Tensor:
        if weight.shape[1] % _BLOCK:
            raise ModelError(f"a quantised axis of {weight.shape[1]} channels is no multiple of {_BLOCK} (spec §1.4)")
        return weight.view(weight.shape[0], -1, _BLOCK)

    def layer(self, prefix: str, kind: LayerKind | None, experts: int) -> None:
        """A backbone layer, or a draft layer (no kind)."""
        c = self._config
        rows = (2 + c.hc_mult) * c.hc_mult
        for part in ("attn", "ffn"):
            self.norm(f"{prefix}.{part}_norm.weight", c.hidden_size)
            self.f32(f"{prefix}.hc_{part}_fn", rows, c.hc_mult * c.hidden_size, std=(c.hc_mult * c.hidden_size) ** -0.5)
            self.f32(f"{prefix}.hc_{part}_base", rows, std=0.5)
            self.f32(f"{prefix}.hc_{part}_scale", 3, std=0.1, mean=1.0)
        self._attention(f"{prefix}.attn", kind)
        self._experts(f"{prefix}.ffn", experts)

    def _attention(self, prefix: str, kind: LayerKind | None) -> None:
        c = self._config
        width = c.num_heads * c.head_dim
        self.fp8(f"{prefix}.wq_a", c.q_lora_rank, c.hidden_size)
        self.norm(f"{prefix}.q_norm.weight", c.q_lora_rank)
        self.fp8(f"{prefix}.wq_b", width, c.q_lora_rank)
        self.fp8(f"{prefix}.wkv", c.head_dim, c.hidden_size)
        self.norm(f"{prefix}.kv_norm.weight", c.head_dim)
        self.f32(f"{prefix}.attn_sink", c.num_heads, std=1.0)
        self.fp8(f"{prefix}.wo_a", c.o_groups * c.o_lora_rank, width // c.o_groups)
        self.fp8(f"{prefix}.wo_b", c.hidden_size, c.o_groups * c.o_lora_rank)
        if kind is None:
            return
        if kind.owns_kv:
            self.bf16(f"{prefix}.compressor.wkv.weight", c.head_dim, c.hidden_size)
            self.norm(f"{prefix}.compressor.norm.weight", c.head_dim)
            if kind.ratio > 1:
                self.bf16(f"{prefix}.compressor.wgate.weight", c.head_dim, c.hidden_size)
            self.bf16(f"{prefix}.indexer.wk.weight", c.index_head_dim, c.head_dim)
            self.norm(f"{prefix}.indexer.k_norm.weight", c.index_head_dim)
        if kind.owns_selection:
            self.fp8(f"{prefix}.indexer.wq_b", c.index_heads * c.index_head_dim, c.q_lora_rank)
            self.bf16(f"{prefix}.indexer.weights_proj.weight", c.index_heads, c.hidden_size)

    def _experts(self, prefix: str, experts: int) -> None:
        c = self._config
        inner, hidden = c.moe_intermediate_size, c.hidden_size
        self.bf16(f"{prefix}.gate.weight", experts, hidden)
        self.f32(f"{prefix}.gate.bias", experts, std=0.1)
        self.f32(f"{prefix}.gate.bias_vl", experts, std=0.1)
        for expert in range(experts):
            self.fp4(f"{prefix}.experts.{expert}.w1", inner, hidden)
            self.fp4(f"{prefix}.experts.{expert}.w3", inner, hidden)
            self.fp4(f"{prefix}.experts.{expert}.w2", hidden, inner)
        self.fp8(f"{prefix}.shared_experts.w1", inner, hidden)
        self.fp8(f"{prefix}.shared_experts.w3", inner, hidden)
        self.fp8(f"{prefix}.shared_experts.w2", hidden, inner)

    def engram(self, prefix: str, rows: int) -> None:
        c = self._config
        if c.engram is None:
            return
        self.fp8_rows(f"{prefix}.embed", rows, c.engram.head_dim)
        self.fp8(f"{prefix}.wkv", (c.hc_mult + 1) * c.hidden_size, c.engram.width)
        self.bf16(f"{prefix}.q_weight", c.hc_mult, c.hidden_size, std=1.0)
        self.bf16(f"{prefix}.k_weight", c.hc_mult, c.hidden_size, std=1.0)

    def draft(self, draft: DraftConfig) -> None:
        c = self._config
        for i in range(draft.layers):
            self.layer(f"mtp.{i}", None, draft.experts)
        self.fp8("mtp.0.main_proj", c.hidden_size, len(draft.target_layers) * c.hidden_size)
        self.norm("mtp.0.main_norm.weight", c.hidden_size)
        last = f"mtp.{draft.layers - 1}"
        self.norm(f"{last}.norm.weight", c.hidden_size)
        self.bf16(f"{last}.markov_head.embed.weight", c.vocab_size, draft.markov_rank)
        self.bf16(f"{last}.markov_head.head.weight", c.vocab_size, draft.markov_rank)
        self.bf16(f"{last}.confidence_head.proj.weight", 1, c.hidden_size + draft.markov_rank)

    def vision(self, v: VisionConfig) -> None:
        hidden, text, cell = v.hidden_size, v.text_hidden_size, v.hidden_size * v.downsample_ratio**2
        for name in ("image_start", "image_end", "image_newline"):
            self.bf16(name, text, std=1.0)
        self._biased("vision.patch_embed.proj", hidden, 3 * v.patch_size**2)
        for i in range(v.num_layers):
            block = f"vision.blocks.{i}"
            self.norm(f"{block}.norm1.weight", hidden)
            self.norm(f"{block}.norm2.weight", hidden)
            self._biased(f"{block}.attn.wqkv", 3 * hidden, hidden)
            self._biased(f"{block}.attn.wo", hidden, hidden)
            self.bf16(f"{block}.mlp.w1.weight", 2 * v.intermediate_size, hidden)
            self.bf16(f"{block}.mlp.w2.weight", hidden, v.intermediate_size)
        self.norm("vision.norm.weight", hidden)
        self._biased("aligner.w1", text, cell)
        self._biased("aligner.w2", text, text)

    def _biased(self, name: str, rows: int, columns: int) -> None:
        self.bf16(f"{name}.weight", rows, columns)
        self.bf16(f"{name}.bias", rows, std=0.02)
