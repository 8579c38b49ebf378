"""Weights of the text model as the operators take them, loaded from a checkpoint for one numeric mode (spec §2, §19).

noquant and kvquant widen every matrix to float32 (a private copy; the models they serve are small). full keeps fp8, fp4
and bf16 as stored, so their pages stay shared between processes. Draft layers and the vision tower are not read here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.engine.loading import ModelError
from headrace.engine.models.deepseek_v41.checkpoint import Checkpoint
from headrace.engine.models.deepseek_v41.config import EngramConfig, LayerKind, V41Config
from headrace.kernels.modes import Numerics
from headrace.kernels.reference.linear import widen
from headrace.kernels.weights import Fp4Weight, Fp8Rows, Fp8Weight, Swiglu, Weight


@dataclass(frozen=True)
class HyperWeights:
    """One hyper-connection, float32 in every mode (spec §6)."""

    fn: torch.Tensor
    """[(2+hc)·hc, hc·d]."""
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class CompressorWeights:
    """Compressor of a kv source (spec §8)."""

    wkv: torch.Tensor
    """[D, d]."""
    wgate: torch.Tensor | None
    """[D, d] where r > 1."""
    norm: torch.Tensor


@dataclass(frozen=True)
class IndexKeyWeights:
    """Index keys of a kv source (spec §9)."""

    wk: torch.Tensor
    """[I, D]."""
    norm: torch.Tensor


@dataclass(frozen=True)
class IndexQueryWeights:
    """Index queries of an index source (spec §9)."""

    wq_b: Weight
    """[heads·I, q_lora_rank]."""
    weights_proj: torch.Tensor
    """[heads, d]."""


@dataclass(frozen=True)
class AttentionWeights:
    """One attention sublayer (spec §7)."""

    wq_a: Weight
    q_norm: torch.Tensor
    wq_b: Weight
    wkv: Weight
    kv_norm: torch.Tensor
    sink: torch.Tensor
    """[H] float32."""
    wo_a: torch.Tensor
    """[groups, o_lora_rank, H·D/groups], dequantised in every mode (spec §2)."""
    wo_b: Weight
    compressor: CompressorWeights | None
    index_keys: IndexKeyWeights | None
    index_queries: IndexQueryWeights | None


@dataclass(frozen=True)
class EngramWeights:
    """One Engram layer (spec §13)."""

    table: Fp8Rows
    wkv: Weight
    q_weight: torch.Tensor
    k_weight: torch.Tensor


@dataclass(frozen=True)
class MoeWeights:
    """Router, routed experts and the shared expert of one layer (spec §10)."""

    gate: torch.Tensor
    bias: torch.Tensor
    image_bias: torch.Tensor
    experts: tuple[Swiglu, ...]
    shared: Swiglu


@dataclass(frozen=True)
class LayerWeights:
    """One backbone layer."""

    attn_norm: torch.Tensor
    ffn_norm: torch.Tensor
    hc_attn: HyperWeights
    hc_ffn: HyperWeights
    attention: AttentionWeights
    moe: MoeWeights
    engram: EngramWeights | None


@dataclass(frozen=True)
class V41Weights:
    """The text model."""

    embed: torch.Tensor
    """[vocab, d] in the activation dtype."""
    norm: torch.Tensor
    head: torch.Tensor
    layers: tuple[LayerWeights, ...]


def load_weights(
    checkpoint: Checkpoint, config: V41Config, numerics: Numerics, device: torch.device | str = "cpu"
) -> V41Weights:
    """Read and prepare every tensor of the text model.

    Raises:
        ModelError: a tensor is missing or disagrees with the config, or the folder holds tensors of another model.
    """
    loader = _Loader(checkpoint, config, numerics, torch.device(device))
    return V41Weights(
        embed=loader.plain("embed.weight", config.vocab_size, config.hidden_size),
        norm=loader.norm("norm.weight", config.hidden_size),
        head=loader.plain("head.weight", config.vocab_size, config.hidden_size),
        layers=tuple(loader.layer(kind) for kind in config.layers),
    )


class _Loader:
    def __init__(self, checkpoint: Checkpoint, config: V41Config, numerics: Numerics, device: torch.device) -> None:
        self._ckpt = checkpoint
        self._config = config
        self._mode = numerics.mode
        self._device = device

    def plain(self, name: str, *shape: int) -> torch.Tensor:
        """A bf16 tensor in the activation dtype."""
        return self._ckpt.bf16(name, *shape).to(self._device, self._mode.activation_dtype)

    def norm(self, name: str, *shape: int) -> torch.Tensor:
        """A norm's weight; operators use it in float32, so it is widened once."""
        return self._ckpt.bf16(name, *shape).to(self._device, torch.float32)

    def f32(self, name: str, *shape: int) -> torch.Tensor:
        return self._ckpt.f32(name, *shape).to(self._device)

    def fp8(self, name: str, rows: int, columns: int) -> Weight:
        values, scales = self._ckpt.fp8(name, rows, columns)
        return self._prepare(Fp8Weight(values.to(self._device), scales.to(self._device)))

    def fp4(self, name: str, rows: int, columns: int) -> Weight:
        packed, scales = self._ckpt.fp4(name, rows, columns)
        return self._prepare(Fp4Weight(packed.to(self._device), scales.to(self._device)))

    def _prepare(self, weight: Fp8Weight | Fp4Weight) -> Weight:
        return weight if self._mode.quantises_linears else widen(weight)

    def layer(self, kind: LayerKind) -> LayerWeights:
        c, prefix = self._config, f"layers.{kind.index}"
        return LayerWeights(
            attn_norm=self.norm(f"{prefix}.attn_norm.weight", c.hidden_size),
            ffn_norm=self.norm(f"{prefix}.ffn_norm.weight", c.hidden_size),
            hc_attn=self._hyper(f"{prefix}.hc_attn"),
            hc_ffn=self._hyper(f"{prefix}.hc_ffn"),
            attention=self._attention(f"{prefix}.attn", kind),
            moe=self._moe(f"{prefix}.ffn"),
            engram=self._engram(f"{prefix}.engram", c.engram, kind.engram) if kind.engram is not None else None,
        )

    def _hyper(self, prefix: str) -> HyperWeights:
        hc = self._config.hc_mult
        rows = (2 + hc) * hc
        return HyperWeights(
            fn=self.f32(f"{prefix}_fn", rows, hc * self._config.hidden_size),
            base=self.f32(f"{prefix}_base", rows),
            scale=self.f32(f"{prefix}_scale", 3),
        )

    def _attention(self, prefix: str, kind: LayerKind) -> AttentionWeights:
        c = self._config
        width = c.num_heads * c.head_dim
        wo_a = Fp8Weight(*self._ckpt.fp8(f"{prefix}.wo_a", c.o_groups * c.o_lora_rank, width // c.o_groups))
        return AttentionWeights(
            wq_a=self.fp8(f"{prefix}.wq_a", c.q_lora_rank, c.hidden_size),
            q_norm=self.norm(f"{prefix}.q_norm.weight", c.q_lora_rank),
            wq_b=self.fp8(f"{prefix}.wq_b", width, c.q_lora_rank),
            wkv=self.fp8(f"{prefix}.wkv", c.head_dim, c.hidden_size),
            kv_norm=self.norm(f"{prefix}.kv_norm.weight", c.head_dim),
            sink=self.f32(f"{prefix}.attn_sink", c.num_heads),
            wo_a=widen(wo_a, self._mode.activation_dtype).to(self._device).view(c.o_groups, c.o_lora_rank, -1),
            wo_b=self.fp8(f"{prefix}.wo_b", c.hidden_size, c.o_groups * c.o_lora_rank),
            compressor=self._compressor(f"{prefix}.compressor", kind) if kind.owns_kv else None,
            index_keys=self._index_keys(f"{prefix}.indexer") if kind.owns_kv else None,
            index_queries=self._index_queries(f"{prefix}.indexer") if kind.owns_selection else None,
        )

    def _compressor(self, prefix: str, kind: LayerKind) -> CompressorWeights:
        shape = (self._config.head_dim, self._config.hidden_size)
        return CompressorWeights(
            wkv=self.plain(f"{prefix}.wkv.weight", *shape),
            wgate=self.plain(f"{prefix}.wgate.weight", *shape) if kind.ratio > 1 else None,
            norm=self.norm(f"{prefix}.norm.weight", self._config.head_dim),
        )

    def _index_keys(self, prefix: str) -> IndexKeyWeights:
        c = self._config
        return IndexKeyWeights(
            wk=self.plain(f"{prefix}.wk.weight", c.index_head_dim, c.head_dim),
            norm=self.norm(f"{prefix}.k_norm.weight", c.index_head_dim),
        )

    def _index_queries(self, prefix: str) -> IndexQueryWeights:
        c = self._config
        return IndexQueryWeights(
            wq_b=self.fp8(f"{prefix}.wq_b", c.index_heads * c.index_head_dim, c.q_lora_rank),
            weights_proj=self.plain(f"{prefix}.weights_proj.weight", c.index_heads, c.hidden_size),
        )

    def _engram(self, prefix: str, engram: EngramConfig | None, ordinal: int) -> EngramWeights:
        if engram is None:
            raise ModelError(f"{prefix}: the config has no Engram part")
        c = self._config
        table = self._ckpt.fp8(f"{prefix}.embed", engram.num_embeddings[ordinal], engram.head_dim, row_block=1)
        return EngramWeights(
            table=Fp8Rows(table[0].to(self._device), table[1].to(self._device)),
            wkv=self.fp8(f"{prefix}.wkv", (c.hc_mult + 1) * c.hidden_size, engram.width),
            q_weight=self.norm(f"{prefix}.q_weight", c.hc_mult, c.hidden_size),
            k_weight=self.norm(f"{prefix}.k_weight", c.hc_mult, c.hidden_size),
        )

    def _moe(self, prefix: str) -> MoeWeights:
        c = self._config
        inner, hidden = c.moe_intermediate_size, c.hidden_size

        def expert(index: int) -> Swiglu:
            name = f"{prefix}.experts.{index}"
            return Swiglu(
                gate=self.fp4(f"{name}.w1", inner, hidden),
                up=self.fp4(f"{name}.w3", inner, hidden),
                down=self.fp4(f"{name}.w2", hidden, inner),
            )

        shared = f"{prefix}.shared_experts"
        return MoeWeights(
            gate=self.plain(f"{prefix}.gate.weight", c.num_experts, hidden),
            bias=self.f32(f"{prefix}.gate.bias", c.num_experts),
            image_bias=self.f32(f"{prefix}.gate.bias_vl", c.num_experts),
            experts=tuple(expert(i) for i in range(c.num_experts)),
            shared=Swiglu(
                gate=self.fp8(f"{shared}.w1", inner, hidden),
                up=self.fp8(f"{shared}.w3", inner, hidden),
                down=self.fp8(f"{shared}.w2", hidden, inner),
            ),
        )
