"""The tolerance forms of the golden format. Each rule returns why a tensor fails, or None when it passes.

A NaN never passes. Values are compared in float64; float8 scales as their bytes when bytes are given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.golden_harness.case import GoldenFormatError, Tensors, Tolerance

MINUS_INFINITY = -1e30
"""How the golden files store −inf."""
MUST_DIFFER_BY = 1e-3
MAP_ATOL = 1e-5
SWAP_TOLERANCE = 1e-3

Rule = Callable[[torch.Tensor, torch.Tensor], str | None]


def values(tensor: torch.Tensor) -> torch.Tensor:
    """float64 values of any dtype; −inf and what stands for it (in whatever precision) become the same number."""
    if tensor.dtype == torch.float8_e8m0fnu:
        tensor = tensor.to(torch.float32)
    wide = tensor.detach().cpu().to(torch.float64)
    return torch.where(wide <= 0.9 * MINUS_INFINITY, MINUS_INFINITY, wide)


def check(tolerance: Tolerance, got: torch.Tensor, ref: torch.Tensor) -> str | None:
    """Compare by a form that needs no other output of the case; raises GoldenFormatError on an unknown form."""
    return rule_of(tolerance)(got, ref)


def rule_of(tolerance: Tolerance) -> Rule:
    if tolerance == "exact":
        return exact
    if tolerance == "row_set":
        return row_set
    if tolerance == "must_differ":
        return must_differ
    if isinstance(tolerance, str):
        match = re.fullmatch(r"bytes\(max_mismatch_frac=([0-9.eE+-]+)\)", tolerance)
        if match:
            limit = float(match[1])
            return lambda got, ref: raw_bytes(got, ref, limit)
        raise GoldenFormatError(f"unknown tolerance form {tolerance!r}")
    names = set(tolerance)
    if {"atol", "rtol"} <= names <= {"atol", "rtol", "max_mismatch_frac", "mismatch_atol"}:
        return lambda got, ref: elementwise(got, ref, tolerance)
    if names == {"rel_l2", "max_abs"}:
        return lambda got, ref: norm_bound(got, ref, tolerance)
    if names == {"row_rel_l2_median", "row_rel_l2_p90"}:
        return lambda got, ref: row_norm_bound(got, ref, tolerance)
    if names == {"mismatch_frac_max"}:
        return lambda got, ref: mismatch_fraction(got, ref, tolerance["mismatch_frac_max"])
    raise GoldenFormatError(f"unknown tolerance form {tolerance!r}")


def _show(tolerance: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in tolerance.items())


def _shape(got: torch.Tensor, ref: torch.Tensor) -> str | None:
    if got.shape != ref.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    return None


def exact(got: torch.Tensor, ref: torch.Tensor) -> str | None:
    """Equal values, −0 = +0; e8m0 scales also against bytes."""
    if torch.float8_e8m0fnu in (got.dtype, ref.dtype) and torch.uint8 in (got.dtype, ref.dtype):
        got, ref = got.cpu().view(torch.uint8), ref.cpu().view(torch.uint8)
    if bad := _shape(got, ref):
        return bad
    if got.dtype.is_floating_point or ref.dtype.is_floating_point:
        got, ref = values(got), values(ref)
    differ = got.cpu() != ref.cpu()
    if not differ.any():
        return None
    at = tuple(int(i) for i in differ.nonzero()[0])
    return (
        f"{int(differ.sum())} of {differ.numel()} values differ, first at {at}: {got[at].item()} for {ref[at].item()}"
    )


def elementwise(got: torch.Tensor, ref: torch.Tensor, tolerance: Mapping[str, float]) -> str | None:
    """``|got − ref| ≤ atol + rtol·|ref|``, but for a fraction of elements that stay within mismatch_atol if given."""
    if bad := _shape(got, ref):
        return bad
    g, r = values(got), values(ref)
    if g.isnan().any():
        return "NaN in the result"
    error = torch.where(g == r, 0.0, (g - r).abs())
    inside = error <= tolerance["atol"] + tolerance["rtol"] * r.abs()
    outside = ~torch.where(r.isfinite(), inside, g == r)
    allowed = tolerance.get("max_mismatch_frac", 0.0) * outside.numel()
    if int(outside.sum()) > allowed:
        worst = error.max().item()
        return f"{int(outside.sum())} of {outside.numel()} outside {_show(tolerance)}; largest difference {worst:.3g}"
    limit = tolerance.get("mismatch_atol")
    if limit is not None and error.numel() and error.max() > limit:
        return f"largest difference {error.max().item():.3g} above mismatch_atol {limit}"
    return None


def norm_bound(got: torch.Tensor, ref: torch.Tensor, tolerance: Mapping[str, float]) -> str | None:
    if bad := _shape(got, ref):
        return bad
    error, reference = values(got) - values(ref), values(ref)
    relative = (error.norm() / reference.norm().clamp_min(1e-300)).item()
    largest = error.abs().max().item()
    if relative <= tolerance["rel_l2"] and largest <= tolerance["max_abs"]:
        return None
    return f"relative L2 {relative:.3g}, largest difference {largest:.3g}; allowed {_show(tolerance)}"


def row_norm_bound(got: torch.Tensor, ref: torch.Tensor, tolerance: Mapping[str, float]) -> str | None:
    """Relative L2 of each (layer, token) row: its median and 90th percentile."""
    if bad := _shape(got, ref):
        return bad
    rows = values(ref).flatten(2).flatten(0, 1) if ref.dim() > 2 else values(ref)
    error = (values(got).reshape(rows.shape) - rows).norm(dim=-1) / rows.norm(dim=-1).clamp_min(1e-300)
    if error.isnan().any():
        return "NaN in the result"
    median, p90 = error.quantile(0.5).item(), error.quantile(0.9).item()
    if median <= tolerance["row_rel_l2_median"] and p90 <= tolerance["row_rel_l2_p90"]:
        return None
    return f"row relative L2 median {median:.3g}, 90th percentile {p90:.3g}; allowed {_show(tolerance)}"


def raw_bytes(got: torch.Tensor, ref: torch.Tensor, limit: float) -> str | None:
    g = got.detach().cpu().contiguous().view(torch.uint8)
    r = ref.contiguous().view(torch.uint8)
    return _shape(g, r) or mismatch_fraction(g, r, limit)


def mismatch_fraction(got: torch.Tensor, ref: torch.Tensor, limit: float) -> str | None:
    if bad := _shape(got, ref):
        return bad
    fraction = (values(got) != values(ref)).double().mean().item()
    return None if fraction <= limit else f"{fraction:.3%} of entries differ; allowed {limit:.3%}"


def must_differ(got: torch.Tensor, ref: torch.Tensor) -> str | None:
    """The stored tensor is a known wrong result: ours must be finite, of its shape, and not it."""
    if bad := _shape(got, ref):
        return bad
    if not values(got).isfinite().all():
        return "not finite, so it differs for no good reason"
    largest = (values(got) - values(ref)).abs().max().item()
    return None if largest > MUST_DIFFER_BY else f"equals the known wrong result within {largest:.3g}"


def row_lists(tensor: torch.Tensor, offset: int = 0) -> list[list[int]]:
    """Sorted entries ≥ 0 of each row, less ``offset``. Duplicates stay, so that they are seen."""
    flat = tensor.detach().cpu().reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
    return [sorted(int(v) - offset for v in row if v >= 0) for row in flat.tolist()]


def row_set(got: torch.Tensor, ref: torch.Tensor) -> str | None:
    if got.shape[:-1] != ref.shape[:-1]:
        return f"shape {tuple(got.shape)}, expected {tuple(ref.shape)} up to the last axis"
    for index, (mine, theirs) in enumerate(zip(row_lists(got), row_lists(ref), strict=True)):
        if mine != theirs:
            return f"row {index} holds {mine}, expected {theirs}"
    return None


def topk_set(
    got: torch.Tensor, must: torch.Tensor, may: torch.Tensor, count: torch.Tensor, offset: int = 0
) -> str | None:
    """Each row's selection ⊇ must, ⊆ may, of exactly ``count`` distinct entries."""
    width = must.shape[-1]
    rows = row_lists(got, offset)
    if len(rows) != must.numel() // width:
        return f"{len(rows)} rows, expected {must.numel() // width}"
    bounds = zip(
        must.reshape(-1, width).tolist(), may.reshape(-1, width).tolist(), count.flatten().tolist(), strict=True
    )
    for index, (row, (needed, allowed, size)) in enumerate(zip(rows, bounds, strict=True)):
        chosen = set(row)
        if len(row) != len(chosen) or len(row) != size:
            return f"row {index} selects {row}: expected {size} distinct entries"
        if not all(0 <= j < width and allowed[j] for j in chosen):
            return f"row {index} selects {row}: {[j for j in row if not (0 <= j < width and allowed[j])]} not allowed"
        if missing := [j for j in range(width) if needed[j] and j not in chosen]:
            return f"row {index} selects {row}: {missing} missing"
    return None


def topk_of(got: torch.Tensor, ref: torch.Tensor, scores: torch.Tensor | None) -> str | None:
    """The stored selection, but for swaps among entries whose stored score is at the k-th best within 1e-3·(1+|s|).

    ``scores [rows, entries]`` is None where the case stores none: the sets must be equal then.
    """
    if got.shape[:-1] != ref.shape[:-1]:
        return f"shape {tuple(got.shape)}, expected {tuple(ref.shape)} up to the last axis"
    mine, theirs = row_lists(got), row_lists(ref)
    table = None if scores is None else values(scores).reshape(-1, scores.shape[-1])
    for index, (row, stored) in enumerate(zip(mine, theirs, strict=True)):
        if row == stored:
            continue
        swapped = set(row) ^ set(stored)
        if len(set(row)) != len(row) or len(row) != len(stored) or table is None:
            return f"row {index} selects {row}, expected {stored}"
        line = table[index]
        if any(j >= line.shape[0] for j in swapped):
            return f"row {index} selects {row}: outside the pool of {line.shape[0]}"
        edge = min(line[j].item() for j in stored)
        if any(abs(line[j].item() - edge) > SWAP_TOLERANCE * (1 + abs(edge)) for j in swapped):
            return f"row {index} selects {row}, expected {stored}; the swapped scores are no tie"
    return None


def expert_map(
    got_experts: torch.Tensor, got_weights: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> str | None:
    """Rows as maps expert → weight, weights within 1e-5; the order of experts is free."""
    if bad := _shape(got_experts, experts) or _shape(got_weights, weights):
        return bad
    width = experts.shape[-1]
    rows: list[Any] = [
        t.detach().cpu().reshape(-1, width).tolist()
        for t in (got_experts, got_weights.double(), experts, weights.double())
    ]
    for index, (mine, mine_w, theirs, theirs_w) in enumerate(zip(*rows, strict=True)):
        if sorted(mine) != sorted(theirs):
            return f"row {index} chooses experts {sorted(mine)}, expected {sorted(theirs)}"
        wanted = dict(zip(theirs, theirs_w, strict=True))
        for expert, weight in zip(mine, mine_w, strict=True):
            if not abs(weight - wanted[expert]) <= MAP_ATOL:
                return f"row {index} weighs expert {expert} with {weight}, expected {wanted[expert]}"
    return None


def related(tolerance: str) -> tuple[str, tuple[str, ...]] | None:
    """``form(a, b, …)`` whose arguments name other outputs of the case: the form and its arguments."""
    match = re.fullmatch(r"(topk_set|topk_of|row_order_free)\(([^()]*)\)", tolerance)
    return None if match is None else (match[1], tuple(part.strip() for part in match[2].split(",")))


def check_related(
    form: str, names: tuple[str, ...], output: str, got: Tensors, ref: Tensors, offset: int = 0
) -> str | None:
    """Compare by a form that needs other outputs. ``ref`` maps every stored output of the case."""
    if form == "topk_set":
        must, may, count = (ref[name] for name in names)
        return topk_set(got[output], must, may, count, offset)
    if form == "topk_of":
        return topk_of(got[output], ref[output], ref.get(output.replace("topk", names[0], 1)))
    weights = names[0]
    if weights not in got:
        return f"no output {weights!r} beside it"
    return expert_map(got[output], got[weights], ref[output], ref[weights])
