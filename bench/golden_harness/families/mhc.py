"""Hyper-connections: coefficients, and the wiring of one block (spec §6)."""

from __future__ import annotations

import torch

from bench.golden_harness.case import Case, Tensors
from bench.golden_harness.registry import runner
from headrace.kernels.ops import Mixes
from headrace.kernels.reference.hyper import project_streams, split_mixes
from headrace.kernels.select import select

NORM_EPS = 1e-20
HC_EPS = 1e-6
ITERATIONS = 20
"""As published; the cases that leave them out of their config mean these."""


@runner("mhc")
def run(case: Case) -> Tensors:
    if "pre_mix" in case.inputs:
        return _block(case)
    if "mixes" in case.inputs:
        return _split(case)
    return _mix(case)


def _mix(case: Case) -> Tensors:
    ops = select(torch.device("cpu")).ops
    streams, out = case.input("x"), case.input("sublayer_out")
    mixes = ops.hyper_mixes(
        streams,
        case.weight("fn"),
        case.weight("scale"),
        case.weight("base"),
        norm_eps=case.number("norm_eps", NORM_EPS),
        hc_eps=case.number("hc_eps", HC_EPS),
        iterations=case.integer("iters", ITERATIONS),
    )
    return {
        "mixes": project_streams(streams, case.weight("fn"), norm_eps=case.number("norm_eps", NORM_EPS)),
        "pre": mixes.pre,
        "post": mixes.post,
        "comb": mixes.combine,
        "collapsed": ops.hyper_collapse(streams, mixes.pre),
        "expanded": ops.hyper_expand(out, streams, mixes.post, mixes.combine),
    }


def _split(case: Case) -> Tensors:
    mixes = split_mixes(
        case.input("mixes"),
        case.input("scale"),
        case.input("base"),
        streams=case.integer("hc_mult"),
        hc_eps=case.number("hc_eps", HC_EPS),
        iterations=case.integer("iters", ITERATIONS),
    )
    return {"pre": mixes.pre, "post": mixes.post, "comb": mixes.combine}


def _block(case: Case) -> Tensors:
    """The schedule of §6: a sublayer collapses with the ``pre`` of the one before it."""
    ops = select(torch.device("cpu")).ops

    def mixes(streams: torch.Tensor, which: str) -> Mixes:
        return ops.hyper_mixes(
            streams,
            case.weight(f"{which}_fn"),
            case.weight(f"{which}_scale"),
            case.weight(f"{which}_base"),
            norm_eps=case.number("norm_eps", NORM_EPS),
            hc_eps=case.number("hc_eps", HC_EPS),
            iterations=case.integer("iters", ITERATIONS),
        )

    def normed(streams: torch.Tensor, pre: torch.Tensor, which: str) -> torch.Tensor:
        collapsed = ops.hyper_collapse(streams, pre)
        return ops.rms_norm(collapsed, case.weight(f"{which}_norm"), case.number("norm_eps", NORM_EPS))

    streams = case.input("x")
    attn = mixes(streams, "attn")
    mid = ops.hyper_expand(case.input("attn_out"), streams, attn.post, attn.combine)
    ffn = mixes(mid, "ffn")
    return {
        "attn_input": normed(streams, case.input("pre_mix"), "attn"),
        "mid": mid,
        "ffn_input": normed(mid, attn.pre, "ffn"),
        "out": ops.hyper_expand(case.input("ffn_out"), mid, ffn.post, ffn.combine),
        "next_pre_mix": ffn.pre,
    }
