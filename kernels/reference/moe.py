"""Mixture of experts: V4.1's and V3's routers, the gated expert, and the sum over chosen experts (spec §10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from headrace.kernels.ops import Linear, LinearFp32, Routing, SwigluOp
from headrace.kernels.reference.activation import sigmoid, silu, softplus
from headrace.kernels.reference.linear import linear as plain_linear
from headrace.kernels.reference.linear import linear_fp32
from headrace.kernels.weights import Swiglu

_NORMALISER_EPS = 1e-20


def top_k_lowest_first(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices ``[..., k]`` of the k best; equal scores: lower index first (a plain top-k leaves ties open)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def route_scores(x: torch.Tensor, gate: torch.Tensor, product: LinearFp32 = linear_fp32) -> torch.Tensor:
    """V4.1's expert scores ``sqrt(softplus(gate · x))`` [T, experts] float32."""
    return softplus(product(x, gate)).sqrt()


def route(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    image_bias: torch.Tensor | None,
    image_mask: torch.Tensor | None,
    *,
    top_k: int,
    scale: float,
    product: LinearFp32 = linear_fp32,
) -> Routing:
    """The bias (the image one on image rows) chooses; unbiased scores, normalised when top_k > 1, weigh."""
    scores = route_scores(x, gate, product)
    if image_bias is not None and image_mask is not None:
        chosen_bias = torch.where(image_mask.unsqueeze(-1), image_bias, bias)
    else:
        chosen_bias = bias
    experts = top_k_lowest_first(scores + chosen_bias, top_k)
    weights = scores.gather(-1, experts)
    if top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + _NORMALISER_EPS)
    return Routing(experts, weights * scale)


def route_grouped(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    groups: int,
    top_groups: int,
    scale: float,
    normalise: bool,
    product: LinearFp32 = linear_fp32,
) -> Routing:
    """V3's group-limited router. A group's score is the sum of its two best biased scores; experts of other groups
    are out (score −inf)."""
    scores = sigmoid(product(x, gate))
    biased = scores + bias
    if groups > 1:
        grouped = biased.reshape(*biased.shape[:-1], groups, -1)
        best_two = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        kept = torch.zeros_like(best_two, dtype=torch.bool)
        kept.scatter_(-1, top_k_lowest_first(best_two, top_groups), True)
        biased = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = top_k_lowest_first(biased, top_k)
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _NORMALISER_EPS)
    return Routing(experts, weights * scale)


def swiglu_activation(
    gate: torch.Tensor, up: torch.Tensor, limit: float, activation: Callable[[torch.Tensor], torch.Tensor] = silu
) -> torch.Tensor:
    """float32 ``silu(min(gate, limit)) · clamp(up, ±limit)``: the gate is clamped from above only; limit 0 = none."""
    g, u = gate.float(), up.float()
    if limit > 0:
        g, u = g.clamp_max(limit), u.clamp(-limit, limit)
    return activation(g) * u


def swiglu(
    x: torch.Tensor,
    weights: Swiglu,
    *,
    limit: float = 0.0,
    row_weight: torch.Tensor | None = None,
    linear: Linear = plain_linear,
    activation: Callable[[torch.Tensor], torch.Tensor] = silu,
) -> torch.Tensor:
    """Gated feed-forward of ``x [T, d]``; ``row_weight [T]`` multiplies before the down projection (§10)."""
    hidden = swiglu_activation(linear(x, weights.gate), linear(x, weights.up), limit, activation)
    if row_weight is not None:
        hidden = hidden * row_weight.unsqueeze(-1)
    return linear(hidden.to(x.dtype), weights.down)


def experts_grouped(
    x: torch.Tensor,
    routing: Routing,
    experts: Sequence[Swiglu],
    *,
    limit: float = 0.0,
    feed_forward: SwigluOp = swiglu,
) -> torch.Tensor:
    """Each expert runs on the rows that chose it. Reads the choice on the host: for the CPU."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    flat = routing.experts.flatten()
    order = flat.sort(stable=True).indices
    rows, row_weights = order // routing.experts.shape[-1], routing.weights.flatten()[order]
    first = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=len(experts)).tolist()):
        if count:
            chosen = slice(first, first + count)
            part = feed_forward(x[rows[chosen]], experts[expert], limit=limit, row_weight=row_weights[chosen])
            out.index_add_(0, rows[chosen], part.float())
            first += count
    return out


def experts_dense(
    x: torch.Tensor,
    routing: Routing,
    experts: Sequence[Swiglu],
    *,
    limit: float = 0.0,
    feed_forward: SwigluOp = swiglu,
) -> torch.Tensor:
    """Every expert runs on every row, weight 0 where it was not chosen. Static shapes and no host read: the reference
    on a GPU, and the plain twin of `experts_grouped`."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index, expert in enumerate(experts):
        row_weight = torch.where(routing.experts == index, routing.weights, 0.0).sum(-1)
        out += feed_forward(x, expert, limit=limit, row_weight=row_weight).float()
    return out
