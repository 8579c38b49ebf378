"""Which lanes of a latent entry a layer's weights can make non-zero: what the C++ attention may leave out.

A model of grouped heads re-expressed as MLA (SmolLM2, or any GQA model written so) has heads that see their group's
lanes only. The zeros are exact, so leaving them out changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LANE_BLOCK = 16
"""Granularity of dead lanes: a whole vector on every machine."""


Run = tuple[int, int]
"""(first, count)."""


@dataclass(frozen=True)
class Lanes:
    """What of q and of the entry [rank16 ‖ rope16] a layer's weights can make non-zero, in blocks of 16."""

    q_rows: list[Run]
    """Rows of the q projection to compute."""
    score: list[list[Run]]
    """Per head, entry lanes that its absorbed query meets."""
    value: list[list[Run]]
    """Per head, latent lanes that its values come from."""
    entry: list[Run]
    """Union over heads of both, cut at the border between latent and rope."""
    nope_live: list[bool]


def find_lanes(
    q: torch.Tensor, kv_b: torch.Tensor, *, heads: int, nope: int, rope: int, v: int, interleaved: bool
) -> Lanes:
    """Read the zeros out of q [heads · (nope + rope), …] and kv_b [heads · (nope + v), rank]."""
    rank = kv_b.shape[1]
    rank16, rope16 = _round_up(rank), _round_up(rope)
    live_q = (q != 0).any(dim=1).view(heads, nope + rope)
    halves = kv_b.view(heads, nope + v, rank)
    live_key = (halves[:, :nope] != 0).any(dim=1)
    live_value = (halves[:, nope:] != 0).any(dim=1)
    q_rows: list[Run] = []
    score: list[list[Run]] = []
    value: list[list[Run]] = []
    nope_live: list[bool] = []
    for head in range(heads):
        has_nope = bool(live_q[head, :nope].any()) and bool(live_key[head].any())
        nope_live.append(has_nope)
        rope_runs = _rope_runs(live_q[head, nope:], interleaved)
        latent_runs = _block_runs(live_key[head]) if has_nope else []
        first = head * (nope + rope)
        rows = [(first, nope)] if has_nope else []
        rows += [(first + nope + at, min(count, rope - at)) for at, count in rope_runs]
        q_rows = _joined([*q_rows, *rows])
        score.append([*latent_runs, *((rank16 + at, count) for at, count in rope_runs)])
        value.append(_block_runs(live_value[head]))
    used = torch.zeros(rank16 + rope16, dtype=torch.bool)
    for runs in (*score, *value):
        for at, count in runs:
            used[at : at + count] = True
    entry = _block_runs(used[:rank16]) + [(rank16 + at, count) for at, count in _block_runs(used[rank16:])]
    return Lanes(q_rows, score, value, entry, nope_live)


def _round_up(value: int) -> int:
    return -(-value // LANE_BLOCK) * LANE_BLOCK


def _block_runs(live: torch.Tensor) -> list[Run]:
    """Runs of blocks of 16 lanes that hold a live one."""
    padded = torch.zeros(_round_up(live.shape[0]), dtype=torch.bool)
    padded[: live.shape[0]] = live
    blocks = padded.view(-1, LANE_BLOCK).any(dim=1).tolist()
    return _joined([(index * LANE_BLOCK, LANE_BLOCK) for index, block in enumerate(blocks) if block])


def _rope_runs(live: torch.Tensor, interleaved: bool) -> list[Run]:
    """Like _block_runs, with the partner that a lane is rotated with: both of a pair live or die together."""
    half = live.shape[0] // 2
    if not interleaved:
        pair = live[:half] | live[half:]
        live = torch.cat((pair, pair))
        if half % LANE_BLOCK:
            live = torch.full_like(live, bool(live.any()))
    return _block_runs(live)


def _joined(runs: list[Run]) -> list[Run]:
    out: list[Run] = []
    for at, count in runs:
        if out and out[-1][0] + out[-1][1] == at:
            out[-1] = (out[-1][0], out[-1][1] + count)
        else:
            out.append((at, count))
    return out


def flatten(runs: list[Run]) -> list[int]:
    """Pairs one behind the other."""
    return [number for run in runs for number in run]


def starts_of(per_head: list[list[Run]]) -> list[int]:
    """[heads + 1] where each head's runs begin in the flat list, counted in pairs."""
    starts = [0]
    for runs in per_head:
        starts.append(starts[-1] + len(runs))
    return starts
