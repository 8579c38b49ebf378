"""The whole forward pass as one call of the C++ decoder (kernels/native): float32 and bf16 weights on the CPU.

Without batch_invariant large chunks run in a faster order of summation than small ones; with it there is one order, and
a row depends on nothing beside it (L5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headrace.engine.batch import StepBatch
from headrace.engine.models.deepseek_v3.config import DeepseekV3Config
from headrace.engine.models.deepseek_v3.moe import DenseFFN, MoE
from headrace.kernels.native.mla import DecoderShape, LayerTensors, NativeDecoder
from headrace.kvcache.layout import KVLayout

if TYPE_CHECKING:
    from headrace.engine.models.deepseek_v3.model import Layer


def native_decoder(
    config: DeepseekV3Config,
    layout: KVLayout,
    layers: Sequence[Layer],
    embedding: torch.Tensor,
    head: torch.Tensor,
    norm: torch.Tensor,
    *,
    batch_invariant: bool,
) -> NativeDecoder:
    """Describe a loaded model to the C++ decoder; its matrices stay where they are.

    Raises:
        NativeUnavailable: there is no compiler or no kernel for the dtypes.
    """
    moe = config.moe
    shape = DecoderShape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        q_rank=config.q_lora_rank or 0,
        rank=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        v=config.v_head_dim,
        vocab=config.vocab_size,
        interleaved=config.rope.interleaved,
        invariant=batch_invariant,
        softmax_scale=config.softmax_scale,
        eps=config.rms_eps,
        lora_eps=config.lora_rms_eps,
        top_k=moe.top_k if moe else 1,
        groups=moe.num_groups if moe else 1,
        top_groups=moe.top_groups if moe else 1,
        normalize=moe.normalize if moe else False,
        route_scale=moe.scale if moe else 1.0,
        block_tokens=layout.block_tokens,
        row_bytes=layout.block_bytes,
        layer_bytes=layout.latents[0].bytes,
    )
    kv_dtype = torch.float32 if layout.kv_dtype == "float32" else torch.bfloat16
    return NativeDecoder(shape, [_tensors(layer) for layer in layers], embedding, head, norm, kv_dtype)


def _tensors(layer: Layer) -> LayerTensors:
    attention, ffn = layer.attention, layer.ffn
    return LayerTensors(
        attention_norm=layer.attention_norm,
        ffn_norm=layer.ffn_norm,
        q_a=attention.q_a,
        q_a_bias=attention.q_a_bias,
        q_a_norm=attention.q_a_norm,
        q=attention.q,
        kv_a=attention.kv_a,
        kv_a_bias=attention.kv_a_bias,
        kv_a_norm=attention.kv_a_norm,
        kv_b=attention.kv_b,
        o=attention.o,
        o_bias=attention.o_bias,
        ffns=[ffn.ffn] if isinstance(ffn, DenseFFN) else ffn.experts,
        router=ffn.gate if isinstance(ffn, MoE) else None,
        router_bias=ffn.bias if isinstance(ffn, MoE) else None,
        shared=ffn.shared if isinstance(ffn, MoE) else None,
    )


def native_step(
    decoder: NativeDecoder, batch: StepBatch, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Logits [S, vocab] float32 of a batch; latents are written into ``rows``."""
    return decoder.step(
        token_ids=batch.token_ids,
        positions=batch.positions,
        starts=batch.starts,
        lengths=batch.lengths,
        block_tables=batch.block_tables,
        logit_rows=batch.logit_rows,
        cos=cos,
        sin=sin,
        rows=rows,
        threads=torch.get_num_threads(),
    )
