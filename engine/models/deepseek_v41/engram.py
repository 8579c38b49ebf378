"""Engram: the n-gram memory added to the residual streams of some producer layers (spec §13)."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from headrace.engine.batch import StepBatch
from headrace.engine.loading import ModelError
from headrace.engine.models.deepseek_v41.config import EngramConfig, V41Config
from headrace.engine.models.deepseek_v41.weights import EngramWeights
from headrace.kernels.ops import Operators
from headrace.kernels.reference.engram import EngramConstants, engram_constants, engram_context

TOKEN_MAP_FILE = "engram_token_map.safetensors"
TOKEN_MAP_TENSOR = "engram_token_map"


def read_token_map(folder: Path, config: V41Config, engram: EngramConfig) -> torch.Tensor:
    """Token id → compressed id, int64 [vocab], from the folder's ``engram_token_map.safetensors``.

    Raises:
        ModelError: the file is missing or broken, or the map does not fit the config (the multipliers depend on it).
    """
    path = folder / TOKEN_MAP_FILE
    try:
        token_map = load_file(str(path))[TOKEN_MAP_TENSOR]
    except (OSError, KeyError, SafetensorError) as error:
        raise ModelError(f"{path}: no Engram token map ({error}); build it with build_token_map") from error
    return check_token_map(token_map, config, engram)


def check_token_map(token_map: torch.Tensor, config: V41Config, engram: EngramConfig) -> torch.Tensor:
    """The map as int64. Raises ModelError unless it gives every id a compressed id below the compressed size."""
    if token_map.dim() != 1 or token_map.shape[0] > config.vocab_size or token_map.shape[0] <= engram.pad_token_id:
        raise ModelError(f"Engram token map has shape {tuple(token_map.shape)}, the vocabulary is {config.vocab_size}")
    low, high = int(token_map.min()), int(token_map.max())
    if low < 0 or high >= engram.compressed_vocab_size:
        raise ModelError(f"Engram token map holds ids {low}..{high}, compressed size is {engram.compressed_vocab_size}")
    return token_map.to(torch.int64)


class EngramContext:
    """Hash constants of all Engram layers and the token map."""

    def __init__(self, engram: EngramConfig, token_map: torch.Tensor, device: torch.device) -> None:
        constants = engram_constants(
            engram.layers, engram.max_ngram, engram.heads, engram.vocab_size, engram.compressed_vocab_size
        )
        if tuple(constants.table_rows.tolist()) != engram.num_embeddings:
            raise ModelError(
                f"engram_num_embeddings {engram.num_embeddings} are not the sums of the primes "
                f"{tuple(constants.table_rows.tolist())}; the config's Engram sizes disagree"
            )
        self.constants = EngramConstants(
            constants.primes.to(device), constants.offsets.to(device), constants.multipliers.to(device)
        )
        self._token_map = token_map.to(device)
        self._pad = int(token_map[engram.pad_token_id])

    def of_step(self, batch: StepBatch, starts: torch.Tensor) -> torch.Tensor:
        """Compressed ids [T, N] that each row hashes, newest first; ``starts [T]``: first position of its chunk."""
        return engram_context(
            batch.token_ids,
            batch.image_mask,
            batch.sequence_of_row,
            batch.positions - starts,
            batch.lookback,
            self._token_map,
            self._pad,
        )


class Engram:
    """One Engram layer."""

    def __init__(
        self, config: V41Config, ordinal: int, weights: EngramWeights, constants: EngramConstants, ops: Operators
    ) -> None:
        self._config = config
        self._weights = weights
        self._multipliers = constants.multipliers[ordinal]
        self._primes = constants.primes[ordinal]
        self._offsets = constants.offsets[ordinal]
        self._ops = ops

    def forward(self, streams: torch.Tensor, context: torch.Tensor, image_mask: torch.Tensor) -> torch.Tensor:
        """``streams [T, hc, d], context [T, N], image_mask [T]`` → streams plus the gated memory."""
        c, w = self._config, self._weights
        found = self._ops.engram_hash(context, self._multipliers, self._primes, self._offsets)
        memory = self._ops.linear(self._ops.engram_lookup(found, w.table, streams.dtype), w.wkv)
        memory = memory.view(-1, c.hc_mult + 1, c.hidden_size)
        keys, value = memory[:, : c.hc_mult], memory[:, c.hc_mult]
        return self._ops.engram_gate(streams, keys, value, w.q_weight, w.k_weight, image_mask, c.norm_eps)
