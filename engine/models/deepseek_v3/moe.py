"""The feed-forward half of a layer: dense, or routed experts plus shared ones."""

from __future__ import annotations

import functools

import torch

from headrace.engine.models.deepseek_v3.config import DeepseekV3Config, MoEConfig
from headrace.engine.weights import Weights
from headrace.kernels.ops import Operators, Routing
from headrace.kernels.weights import Swiglu


def _swiglu(weights: Weights, prefix: str, dtype: torch.dtype, hidden: int, intermediate: int) -> Swiglu:
    return Swiglu(
        gate=weights.get(f"{prefix}.gate_proj.weight", dtype, (intermediate, hidden)),
        up=weights.get(f"{prefix}.up_proj.weight", dtype, (intermediate, hidden)),
        down=weights.get(f"{prefix}.down_proj.weight", dtype, (hidden, intermediate)),
    )


class DenseFFN:
    """down(silu(gate x) · up x)."""

    def __init__(
        self, config: DeepseekV3Config, weights: Weights, prefix: str, ops: Operators, dtype: torch.dtype
    ) -> None:
        self.ops = ops
        self.ffn = _swiglu(weights, prefix, dtype, config.hidden_size, config.intermediate_size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.swiglu(x, self.ffn)


class MoE:
    """Group-limited sigmoid routing without an auxiliary loss (noaux_tc), arXiv 2412.19437 §2.1.2.

    Experts are held one by one, as Hugging Face folders store them: views over the map, no stacked copy.
    """

    def __init__(
        self,
        config: DeepseekV3Config,
        moe: MoEConfig,
        weights: Weights,
        prefix: str,
        ops: Operators,
        dtype: torch.dtype,
    ) -> None:
        self.moe = moe
        self.ops = ops
        hidden, width = config.hidden_size, moe.intermediate_size
        self.gate = weights.get(f"{prefix}.gate.weight", torch.float32, (moe.num_experts, hidden))
        self.bias = weights.get(f"{prefix}.gate.e_score_correction_bias", torch.float32, (moe.num_experts,))
        self.wide: tuple[torch.Tensor, torch.Tensor] | None = None
        """Where every token runs every expert: gate and up of all of them, [experts · width, hidden] each."""
        if moe.routes_to_all:
            self.wide, self.experts = _side_by_side(weights, prefix, dtype, moe)
        else:
            self.experts = [
                _swiglu(weights, f"{prefix}.experts.{index}", dtype, hidden, width) for index in range(moe.num_experts)
            ]
        self.shared = (
            _swiglu(weights, f"{prefix}.shared_experts", dtype, hidden, moe.num_shared * width)
            if moe.num_shared
            else None
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        moe = self.moe
        routing = self.ops.route_grouped(
            x,
            self.gate,
            self.bias,
            top_k=moe.top_k,
            groups=moe.num_groups,
            top_groups=moe.top_groups,
            scale=moe.scale,
            normalise=moe.normalize,
        )
        out = self.ops.experts(x, routing, self.experts) if self.wide is None else self._all_experts(x, routing)
        if self.shared is not None:
            out = out + self.ops.swiglu(x, self.shared)
        return out.to(x.dtype)

    def _all_experts(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Two wide products and one per expert, instead of three per expert on gathered rows → [T, hidden] float32."""
        assert self.wide is not None
        gate, up = (self.ops.linear(x, part) for part in self.wide)
        by_expert = torch.empty_like(routing.weights).scatter_(-1, routing.experts, routing.weights)
        inner = torch.nn.functional.silu(gate.float()) * up.float()
        inner = inner.view(x.shape[0], self.moe.num_experts, -1) * by_expert.unsqueeze(-1)
        parts = (
            self.ops.linear(inner[:, index].to(x.dtype).contiguous(), expert.down).float()
            for index, expert in enumerate(self.experts)
        )
        return functools.reduce(torch.add, parts)


def _side_by_side(
    weights: Weights, prefix: str, dtype: torch.dtype, moe: MoEConfig
) -> tuple[tuple[torch.Tensor, torch.Tensor], list[Swiglu]]:
    """Joined gate and up, and the experts as views of them. No copy where the file has them one behind the other."""

    def names(part: str) -> list[str]:
        return [f"{prefix}.experts.{index}.{part}_proj.weight" for index in range(moe.num_experts)]

    gate, up = weights.cat(names("gate"), dtype), weights.cat(names("up"), dtype)
    down = weights.stack(names("down"), dtype)
    rows = zip(gate.chunk(moe.num_experts), up.chunk(moe.num_experts), down, strict=True)
    return (gate, up), [Swiglu(*parts) for parts in rows]
