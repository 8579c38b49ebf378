"""DeepSeek-V3 behind the engine's Model protocol: embed → (attention, feed-forward) per layer → norm → head."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from headrace.compiler import NativeUnavailable
from headrace.engine.batch import StepBatch
from headrace.engine.loading import ModelError, ModelSettings, folder_dtype
from headrace.engine.models.deepseek_v3.attention import Attention
from headrace.engine.models.deepseek_v3.config import DeepseekV3Config, parse_config
from headrace.engine.models.deepseek_v3.moe import DenseFFN, MoE
from headrace.engine.models.deepseek_v3.native import native_decoder, native_step
from headrace.engine.models.deepseek_v3.plan import StepPlan, plan_step, rope_tables
from headrace.engine.weights import Weights
from headrace.kernels.native.mla import NativeDecoder
from headrace.kernels.ops import Operators
from headrace.kernels.select import select
from headrace.kvcache.layout import v3_layout
from headrace.kvcache.pool import KVPool

_log = logging.getLogger(__name__)


CHUNK_TOKENS = 64


class Layer:
    """x + attention(norm x), then x + ffn(norm x)."""

    def __init__(
        self,
        config: DeepseekV3Config,
        weights: Weights,
        index: int,
        ops: Operators,
        dtype: torch.dtype,
        settings: ModelSettings,
    ) -> None:
        prefix = f"model.layers.{index}"
        hidden = (config.hidden_size,)
        self.ops = ops
        self.eps = config.rms_eps
        self.attention_norm = weights.get(f"{prefix}.input_layernorm.weight", dtype, hidden)
        self.attention = Attention(
            config, weights, f"{prefix}.self_attn", ops, dtype, settings.attention, settings.batch_invariant
        )
        self.ffn_norm = weights.get(f"{prefix}.post_attention_layernorm.weight", dtype, hidden)
        self.ffn: DenseFFN | MoE
        if config.is_moe(index) and config.moe is not None:
            self.ffn = MoE(config, config.moe, weights, f"{prefix}.mlp", ops, dtype)
        else:
            self.ffn = DenseFFN(config, weights, f"{prefix}.mlp", ops, dtype)

    def __call__(self, x: torch.Tensor, plan: StepPlan, latents: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.ops.rms_norm(x, self.attention_norm, self.eps), plan, latents)
        return x + self.ffn(self.ops.rms_norm(x, self.ffn_norm, self.eps))


class DeepseekV3:
    """MLA + MoE decoder over pool rows [layer][token][kv_lora ‖ rope]. No slot, no look-back, no images."""

    lookback_tokens = 0
    supports_replay = True
    image_token_id: int | None = None

    def __init__(self, config: DeepseekV3Config, weights: Weights, dtype: torch.dtype, settings: ModelSettings) -> None:
        """Weights stay views over the folder's maps where their dtype is ``dtype`` and the device is the CPU."""
        self.config = config
        self.dtype = dtype
        self.device = torch.device(settings.device)
        self.layout = v3_layout(
            num_layers=config.num_layers,
            kv_lora_rank=config.kv_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            kv_dtype="float32" if settings.entry_format == "float32" or dtype == torch.float32 else "bfloat16",
            block_tokens=settings.block_tokens,
        )
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.context_tokens = config.max_positions
        self.eos_token_ids = config.eos_token_ids

        self.ops = select(self.device, batch_invariant=settings.batch_invariant).ops
        table = (config.vocab_size, config.hidden_size)
        self.embedding = weights.get("model.embed_tokens.weight", dtype, table)
        self.head = self.embedding if config.tie_embeddings else weights.get("lm_head.weight", dtype, table)
        self.norm = weights.get("model.norm.weight", dtype, (config.hidden_size,))
        self.frequencies = torch.tensor(config.rope.inverse_frequencies, dtype=torch.float32, device=self.device)
        self.layers = [Layer(config, weights, index, self.ops, dtype, settings) for index in range(config.num_layers)]

        self.native = self._find_native(settings)
        self.chunks_on_torch = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        """With matrix units torch's bf16 product outruns the vector kernels on long inputs (759 GFLOP/s on two cores,
        float32 190), so steps of CHUNK_TOKENS rows and more run on torch operators there."""

    def _find_native(self, settings: ModelSettings) -> NativeDecoder | None:
        if not settings.native_kernels or self.device.type != "cpu" or settings.attention != "auto":
            return None
        try:
            return native_decoder(
                self.config,
                self.layout,
                self.layers,
                self.embedding,
                self.head,
                self.norm,
                batch_invariant=settings.batch_invariant,
            )
        except NativeUnavailable as reason:
            _log.warning("DeepSeek-V3 runs on torch operators: %s", reason)
            return None

    @property
    def backend(self) -> str:
        """What computes, for status reports: ``native`` or ``torch``."""
        return "torch" if self.native is None else "native"

    @torch.inference_mode()
    def forward(self, batch: StepBatch, pool: KVPool) -> torch.Tensor:
        """Write the batch's latents into the pool's rows; return logits [S, vocab_size] float32."""
        if self.native is not None and not (self.chunks_on_torch and batch.num_tokens >= CHUNK_TOKENS):
            cos, sin = rope_tables(batch.positions, self.frequencies, self.config.rope.attention_factor)
            return native_step(self.native, batch, pool.rows, cos, sin)
        plan = plan_step(batch, self.layout.block_tokens, self.frequencies, self.config.rope.attention_factor)
        latents = self.latent_view(pool)
        x = torch.nn.functional.embedding(batch.token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            x = layer(x, plan, latents[:, index])
        x = self.ops.rms_norm(x[batch.logit_rows], self.norm, self.config.rms_eps)
        return self.ops.linear(x, self.head).float()

    def latent_view(self, pool: KVPool) -> torch.Tensor:
        """The pool's rows as [pool rows, layers, block_tokens, R + rope] in the KV dtype, without the padding."""
        layout = self.layout
        dtype = torch.float32 if layout.kv_dtype == "float32" else torch.bfloat16
        used = layout.num_layers * layout.block_tokens * layout.latent_width
        return pool.rows.view(dtype)[:, :used].view(-1, layout.num_layers, layout.block_tokens, layout.latent_width)


def load(folder: Path, config: dict[str, object], settings: ModelSettings) -> DeepseekV3:
    """Entry point of engine/loading.py.

    Raises:
        ModelError: config, weights and settings do not fit together.
    """
    if settings.numeric_mode != "noquant":
        raise ModelError(f"DeepSeek-V3 knows numeric_mode noquant only, not {settings.numeric_mode}")
    dtype = settings.resolved_dtype(folder_dtype(config))
    if settings.batch_invariant and dtype != torch.float32:
        raise ModelError("batch_invariant needs dtype float32: load the float32 folder or set dtype to float32")
    return DeepseekV3(parse_config(config), Weights(folder, torch.device(settings.device)), dtype, settings)
