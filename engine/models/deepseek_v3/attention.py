"""Multi-head latent attention over pool rows, in two forms that agree up to rounding.

Per token the pool keeps c = [latent kv_lora_rank ‖ rotated key qk_rope_head_dim], shared by all heads. With W_uk and
W_uv the key and value parts of kv_b_proj for head h:

- naive: k = [W_uk latent ‖ rope key], v = W_uv latent, plain attention. Expands every visible key, so it pays for long
  chunks.
- absorbed: q̃ = [W_ukᵀ q_nope ‖ q_rope] meets c directly, and W_uv is applied once to Σ p · latent. Expands nothing, so
  it pays for decode.

batch_invariant (L5) always runs the absorbed form, keys in tiles of 128 from position 0 with a running maximum,
products on padded row counts: a row's bytes do not depend on the chunk or the batch around it.
"""

from __future__ import annotations

from typing import Literal

import torch

from headrace.engine.models.deepseek_v3.config import DeepseekV3Config
from headrace.engine.models.deepseek_v3.plan import QueryGroup, StepPlan
from headrace.engine.weights import Weights
from headrace.kernels.ops import Operators
from headrace.kernels.reference.linear import matmul_rows

KEY_TILE = 128
"""Keys per step of the batch-invariant reduction (spec/protocol.md, Exactness)."""
QUERY_TILE = 128
"""Queries whose scores exist at a time: bounds the score matrix at H · 128 · keys."""


class Attention:
    """One layer's weights and the computation."""

    def __init__(
        self,
        config: DeepseekV3Config,
        weights: Weights,
        prefix: str,
        ops: Operators,
        dtype: torch.dtype,
        form: Literal["auto", "absorbed", "naive"],
        batch_invariant: bool,
    ) -> None:
        heads, rank = config.num_heads, config.kv_lora_rank
        hidden, query = config.hidden_size, config.num_heads * config.qk_head_dim
        self.config = config
        self.ops = ops
        self.form = form
        self.batch_invariant = batch_invariant

        def bias(name: str) -> torch.Tensor | None:
            return weights.get(f"{prefix}.{name}.bias", dtype) if config.attention_bias else None

        self.q_a: torch.Tensor | None = None
        self.q_a_bias: torch.Tensor | None = None
        self.q_a_norm: torch.Tensor | None = None
        if config.q_lora_rank is None:
            self.q = weights.get(f"{prefix}.q_proj.weight", dtype, (query, hidden))
        else:
            self.q_a = weights.get(f"{prefix}.q_a_proj.weight", dtype, (config.q_lora_rank, hidden))
            self.q_a_bias = bias("q_a_proj")
            self.q_a_norm = weights.get(f"{prefix}.q_a_layernorm.weight", dtype, (config.q_lora_rank,))
            self.q = weights.get(f"{prefix}.q_b_proj.weight", dtype, (query, config.q_lora_rank))
        self.kv_a = weights.get(f"{prefix}.kv_a_proj_with_mqa.weight", dtype, (config.latent_width, hidden))
        self.kv_a_bias = bias("kv_a_proj_with_mqa")
        self.kv_a_norm = weights.get(f"{prefix}.kv_a_layernorm.weight", dtype, (rank,)) if config.kv_a_norm else None
        expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b = weights.get(f"{prefix}.kv_b_proj.weight", dtype, (expanded, rank))
        per_head = self.kv_b.view(heads, config.qk_nope_head_dim + config.v_head_dim, rank)
        self.w_uk, self.w_uv = torch.split(per_head, [config.qk_nope_head_dim, config.v_head_dim], dim=1)
        """[H, nope, R] and [H, v, R], views."""
        self.o = weights.get(f"{prefix}.o_proj.weight", dtype, (hidden, heads * config.v_head_dim))
        self.o_bias = bias("o_proj")

    def __call__(self, x: torch.Tensor, plan: StepPlan, latents: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] normalised → [T, hidden].

        ``latents`` [pool rows, block_tokens, R + rope] is this layer's view of the pool; the new tokens' entries are
        written before anyone reads.
        """
        config = self.config
        turn = self.ops.rope if config.rope.interleaved else self.ops.rope_halves
        latents[plan.pool_rows, plan.offsets] = self._entries(x, plan).to(latents.dtype)
        if self.q_a is None or self.q_a_norm is None:
            q = self.ops.linear(x, self.q)
        else:
            low = self.ops.linear(x, self.q_a, self.q_a_bias)
            q = self.ops.linear(self.ops.rms_norm(low, self.q_a_norm, config.lora_rms_eps), self.q)
        q = turn(q.view(-1, config.num_heads, config.qk_head_dim), plan.cos, plan.sin)
        out = x.new_empty(x.shape[0], config.num_heads * config.v_head_dim)
        for group in plan.groups:
            keys = latents[group.tables].flatten(1, 2)[:, : group.keys].to(x.dtype)
            grouped = q[group.rows].view(group.sequences, group.tokens, config.num_heads, config.qk_head_dim)
            out[group.rows] = self._attend(grouped, keys, group).flatten(2).flatten(0, 1)
        return self.ops.linear(out, self.o, self.o_bias)

    def _entries(self, x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """[T, R + rope] of the new tokens, as the pool keeps them."""
        config = self.config
        turn = self.ops.rope if config.rope.interleaved else self.ops.rope_halves
        compressed = self.ops.linear(x, self.kv_a, self.kv_a_bias)
        latent, rope_key = torch.split(compressed, [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        if self.kv_a_norm is not None:
            latent = self.ops.rms_norm(latent, self.kv_a_norm, config.lora_rms_eps)
        return torch.cat((latent, turn(rope_key, plan.cos, plan.sin)), dim=-1)

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, group: QueryGroup) -> torch.Tensor:
        """q [G, n, H, nope + rope], keys [G, L, R + rope] → [G, n, H, v]."""
        if self.batch_invariant:
            parts = [self._absorbed_tiles(q[g], keys[g], group.positions[g]) for g in range(group.sequences)]
            return torch.stack(parts)
        if self.form == "naive" or (self.form == "auto" and self._naive_is_cheaper(group)):
            return self._naive(q, keys, group)
        return self._absorbed(q, keys, group)

    def _naive_is_cheaper(self, group: QueryGroup) -> bool:
        """Multiply-adds per head: n · L · (width met per key) plus what is expanded once."""
        config, n, length = self.config, group.tokens, group.keys
        expand = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
        naive = n * length * (config.qk_head_dim + config.v_head_dim) + length * expand
        return naive < n * length * (config.latent_width + config.kv_lora_rank) + n * expand

    def _naive(self, q: torch.Tensor, keys: torch.Tensor, group: QueryGroup) -> torch.Tensor:
        config = self.config
        latent, rope_key = torch.split(keys, [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        k_nope = torch.einsum("glr,hdr->ghld", latent, self.w_uk)
        v = torch.einsum("glr,hdr->ghld", latent, self.w_uv)
        k = torch.cat((k_nope, rope_key.unsqueeze(1).expand(-1, config.num_heads, -1, -1)), dim=-1)
        return self._softmax_attention(q.transpose(1, 2), k, v, group).transpose(1, 2)

    def _absorbed(self, q: torch.Tensor, keys: torch.Tensor, group: QueryGroup) -> torch.Tensor:
        config = self.config
        q_nope, q_rope = torch.split(q, [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        absorbed = torch.cat((torch.einsum("gnhd,hdr->ghnr", q_nope, self.w_uk), q_rope.transpose(1, 2)), dim=-1)
        shared = keys.unsqueeze(1)
        mixed = self._softmax_attention(absorbed, shared, shared[..., : config.kv_lora_rank], group)
        return torch.einsum("ghnr,hdr->gnhd", mixed, self.w_uv)

    def _softmax_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: QueryGroup) -> torch.Tensor:
        """q [G, H, n, d], k [G, H or 1, L, d], v [G, H or 1, L, e] → [G, H, n, e]; softmax in float32."""
        parts = []
        key_positions = torch.arange(group.keys, device=q.device)
        for first in range(0, group.tokens, QUERY_TILE):
            queries = slice(first, first + QUERY_TILE)
            scores = torch.matmul(q[:, :, queries], k.transpose(-1, -2)).float() * self.config.softmax_scale
            hidden = key_positions > group.positions[:, queries, None]
            scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
            parts.append(torch.matmul(scores.softmax(-1).to(v.dtype), v))
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]

    def _absorbed_tiles(self, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q [n, H, nope + rope], keys [L, R + rope] of one sequence → [n, H, v]; see the module's last paragraph."""
        config, (tokens, heads, _) = self.config, q.shape
        rank, nope = config.kv_lora_rank, config.qk_nope_head_dim
        q_nope, q_rope = torch.split(q, [nope, config.qk_rope_head_dim], dim=-1)
        latent_query = [matmul_rows(q_nope[:, h].contiguous(), self.w_uk[h].T.contiguous()) for h in range(heads)]
        absorbed = torch.cat((torch.stack(latent_query, dim=1), q_rope), dim=-1).flatten(0, 1)
        row_positions = positions.repeat_interleave(heads)
        peak = absorbed.new_full((tokens * heads, 1), float("-inf"))
        total = absorbed.new_zeros(tokens * heads, 1)
        mixed = absorbed.new_zeros(tokens * heads, rank)
        for start in range(0, keys.shape[0], KEY_TILE):
            tile = keys[start : start + KEY_TILE]
            if tile.shape[0] < KEY_TILE:
                tile = torch.nn.functional.pad(tile, (0, 0, 0, KEY_TILE - tile.shape[0]))
            scores = matmul_rows(absorbed, tile) * config.softmax_scale
            hidden = torch.arange(start, start + KEY_TILE, device=q.device) > row_positions.unsqueeze(-1)
            scores.masked_fill_(hidden, float("-inf"))
            new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
            # A tile wholly behind a row gives exp(0) = 1 and weights of 0: the row keeps its bytes.
            shrink = torch.exp(peak - new_peak)
            share = torch.exp(scores - new_peak)
            total = total * shrink + share.sum(-1, keepdim=True)
            mixed = mixed * shrink + matmul_rows(share, tile[:, :rank].T.contiguous())
            peak = new_peak
        mixed = (mixed / total).view(tokens, heads, rank)
        out = [matmul_rows(mixed[:, h].contiguous(), self.w_uv[h]) for h in range(heads)]
        return torch.stack(out, dim=1)
