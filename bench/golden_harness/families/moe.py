"""Router, gated activation and the whole mixture (spec §10)."""

from __future__ import annotations

import torch

from bench.golden_harness.case import Case, Tensors
from bench.golden_harness.families.linear import quantised
from bench.golden_harness.registry import runner
from headrace.kernels.ops import Routing
from headrace.kernels.reference.moe import route_scores, swiglu_activation
from headrace.kernels.select import select
from headrace.kernels.weights import Swiglu


@runner("moe")
def run(case: Case) -> Tensors:
    if "up" in case.inputs:
        gate, up = case.input("gate"), case.input("up")
        return {
            "y": swiglu_activation(gate, up, case.number("limit")),
            "y_nolimit": swiglu_activation(gate, up, 0.0),
        }
    if "recommended" in case.outputs:
        return _tie(case)
    if "routed" in case.outputs:
        return _module(case)
    return _gate(case)


def _route(case: Case, gate: str, image_mask: torch.Tensor | None = None) -> Routing:
    return select(torch.device("cpu")).ops.route(
        case.input("x"),
        case.weight(gate),
        case.weight("bias"),
        case.weight("bias_vl") if "bias_vl" in case.weights else None,
        image_mask,
        top_k=case.integer("top_k"),
        scale=case.number("route_scale"),
    )


def _gate(case: Case) -> Tensors:
    routing = _route(case, "weight")
    out = {
        "scores": route_scores(case.input("x"), case.weight("weight")),
        "indices": routing.experts,
        "weights": routing.weights,
    }
    if "image_mask" in case.inputs:
        with_image = _route(case, "weight", case.input("image_mask"))
        out |= {"img_indices": with_image.experts, "img_weights": with_image.weights}
    return out


def _tie(case: Case) -> Tensors:
    """Every row of the input is alike: the choice of the first row, and all experts that tie with it."""
    routing = _route(case, "weight")
    biased = route_scores(case.input("x"), case.weight("weight"))[0] + case.weight("bias")
    return {
        "recommended": routing.experts[0],
        "allowed": biased >= biased[routing.experts[0]].min(),
        "weight": routing.weights[0, 0],
    }


def _module(case: Case) -> Tensors:
    ops = select(torch.device("cpu")).ops

    def swiglu_of(prefix: str) -> Swiglu:
        w1, w3, w2 = (quantised(case, f"{prefix}.{name}", f"{prefix}.{name}_scale") for name in ("w1", "w3", "w2"))
        return Swiglu(gate=w1, up=w3, down=w2)

    x, limit = case.input("x"), case.number("limit")
    routing = _route(case, "gate")
    routed = ops.experts(x, routing, [swiglu_of(f"e{i}") for i in range(case.integer("experts"))], limit=limit)
    shared = ops.swiglu(x, swiglu_of("shared"), limit=limit).float()
    return {
        "indices": routing.experts,
        "weights": routing.weights,
        "routed": routed,
        "shared": shared,
        "y": (routed + shared).to(x.dtype),
    }
