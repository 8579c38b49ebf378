"""Routing of our own: skewed experts, topics that come and go, drift. The form is that of recorded routing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.router.balancers.base import Tokens


def routing(
    tokens: int, layers: int, experts: int, top_k: int = 4, topics: int = 6, run: int = 96, seed: int = 0
) -> npt.NDArray[np.uint8]:
    """ids [layers, tokens, top_k]: every `run` tokens or so the text turns to another topic, which prefers its own
    experts; some experts are popular in all, and their popularity drifts from the first token to the last."""
    chance = np.random.default_rng(seed)
    base = chance.normal(0, 0.6, (layers, experts))
    drift = chance.normal(0, 0.15, (layers, experts))
    preference = chance.normal(0, 0.8, (topics, layers, experts))
    ids = np.empty((layers, tokens, top_k), np.uint8)
    begin = 0
    while begin < tokens:
        end = min(tokens, begin + 1 + int(chance.integers(2 * run)))
        liking = base + drift * (begin / tokens) + preference[chance.integers(topics)]
        noise = chance.gumbel(size=(layers, end - begin, experts))
        ids[:, begin:end] = np.argsort(-(liking[:, None] + noise), axis=2)[:, :, :top_k]
        begin = end
    return ids


def counted(ids: npt.NDArray[np.uint8], size: int, experts: int) -> Tokens:
    """Tokens by interval of `size` tokens, layer and expert; a plain twin of what the benchmark does."""
    layers, tokens, _ = ids.shape
    counts = np.zeros((tokens // size, layers, experts), np.int64)
    for step in range(tokens // size):
        for layer in range(layers):
            for expert in ids[layer, step * size : (step + 1) * size].ravel():
                counts[step, layer, expert] += 1
    return counts
