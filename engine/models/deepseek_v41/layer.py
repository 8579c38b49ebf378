"""One backbone layer: Engram, attention and experts, wired by shifted hyper-connections (spec §4, §6)."""

from __future__ import annotations

import torch

from headrace.engine.models.deepseek_v41.attention import Attention
from headrace.engine.models.deepseek_v41.compressor import Compressor
from headrace.engine.models.deepseek_v41.config import LayerKind, V41Config
from headrace.engine.models.deepseek_v41.engram import Engram
from headrace.engine.models.deepseek_v41.rows import RowSet
from headrace.engine.models.deepseek_v41.step import Step
from headrace.engine.models.deepseek_v41.weights import HyperWeights, LayerWeights, MoeWeights
from headrace.kernels.ops import Mixes, Operators


class Layer:
    """One layer of any kind; what it lacks is None."""

    def __init__(
        self,
        config: V41Config,
        kind: LayerKind,
        weights: LayerWeights,
        engram: Engram | None,
        ops: Operators,
        *,
        quantised: bool,
    ) -> None:
        self.kind = kind
        self._config = config
        self._weights = weights
        self._ops = ops
        self._engram = engram
        self._attention = Attention(config, kind, weights.attention, ops, quantised=quantised)
        w = weights.attention
        self._compressor = (
            Compressor(kind.index, kind.ratio, config.norm_eps, w.compressor, w.index_keys, ops)
            if w.compressor and w.index_keys
            else None
        )
        self._starts_consumers = kind.index == config.first_consumer
        self._is_target = kind.index in config.draft_targets

    def forward(
        self,
        streams: torch.Tensor,
        pre: torch.Tensor,
        step: Step,
        engram_context: torch.Tensor | None,
        image_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """``streams [n, hc, d], pre [n, hc]`` in and out.

        At the first consumer all rows publish their KV, then only the kept rows go on; None when there are none.
        """
        kind, index = self.kind, self.kind.index
        rows = step.rows.kept if kind.is_consumer and not self._starts_consumers else step.rows.all
        streams = step.replace("layer_input", index, rows, streams)
        pre = step.replace("pre_input", index, rows, pre)
        if self._engram is not None and engram_context is not None:
            streams = self._engram.forward(streams, engram_context, image_mask)
        x = self._normed(streams, pre, self._weights.attn_norm)
        x = step.replace("attention_input", index, rows, x)
        if self._compressor is not None:
            self._compressor.publish(x, step)
        if self._starts_consumers and step.rows.kept is not rows:
            rows = step.rows.kept
            if rows.count == 0:
                return None
            streams, pre, x = rows.take(streams), rows.take(pre), rows.take(x)
        if self._is_target and step.probe is not None:
            step.record("feature", index, rows, streams.float().mean(1).to(streams.dtype))
        attn = self._mixes(streams, self._weights.hc_attn)
        y = self._attention.forward(x, rows, step)
        step.record("attention_output", index, rows, y)
        streams = self._ops.hyper_expand(y, streams, attn.post, attn.combine)
        ffn = self._mixes(streams, self._weights.hc_ffn)
        z = self._moe(self._normed(streams, attn.pre, self._weights.ffn_norm), self._weights.moe, rows)
        streams = self._ops.hyper_expand(z, streams, ffn.post, ffn.combine)
        step.record("layer_output", index, rows, streams)
        step.record("pre_output", index, rows, ffn.pre)
        return streams, ffn.pre

    def _normed(self, streams: torch.Tensor, pre: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(self._ops.hyper_collapse(streams, pre), norm, self._config.norm_eps)

    def _mixes(self, streams: torch.Tensor, weights: HyperWeights) -> Mixes:
        c = self._config
        return self._ops.hyper_mixes(
            streams,
            weights.fn,
            weights.scale,
            weights.base,
            norm_eps=c.norm_eps,
            hc_eps=c.hc_eps,
            iterations=c.hc_sinkhorn_iters,
        )

    def _moe(self, x: torch.Tensor, weights: MoeWeights, rows: RowSet) -> torch.Tensor:
        """Routed experts in float32 plus the shared expert, then cast (spec §10)."""
        c = self._config
        routing = self._ops.route(
            x,
            weights.gate,
            weights.bias,
            weights.image_bias,
            rows.image_mask,
            top_k=c.experts_per_token,
            scale=c.route_scale,
        )
        routed = self._ops.experts(x, routing, weights.experts, limit=c.swiglu_limit)
        return (routed + self._ops.swiglu(x, weights.shared, limit=c.swiglu_limit).float()).to(x.dtype)
