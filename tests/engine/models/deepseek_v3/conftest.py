"""Random tiny DeepSeek-V3 folders, and a driver that runs a model over a pool as the engine does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.batch import StepBatch
from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.model import Model
from headrace.kvcache.pool import KVPool

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_nope_head_dim": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "num_mtp_layers": 0,
}
"""Widths are no multiples of a vector on purpose."""


@dataclass
class Running:
    """One running sequence of the driver."""

    rows: list[int] = field(default_factory=list)
    length: int = 0


class Driver:
    """Feeds chunks of several sequences to a model and collects logits of every new token."""

    def __init__(self, model: Model, *, rows: int = 64) -> None:
        self.model = model
        self.pool = KVPool(model.layout, num_rows=rows)
        self.sequences: dict[int, Running] = {}

    def step(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """One forward pass of (sequence id, new tokens) pairs → logits [n, vocab] of each."""
        block = self.model.layout.block_tokens
        tokens, positions, owners, starts, lengths, tables = [], [], [], [], [], []
        for index, (key, ids) in enumerate(chunks):
            sequence = self.sequences.setdefault(key, Running())
            end = sequence.length + len(ids)
            missing = -(-end // block) - len(sequence.rows)
            if missing > 0:
                sequence.rows.extend(self.pool.allocate_rows(missing, key))
            starts.append(sequence.length)
            lengths.append(len(ids))
            tokens.extend(ids)
            positions.extend(range(sequence.length, end))
            owners.extend([index] * len(ids))
            tables.append(sequence.rows)
            sequence.length = end
        width = max(len(table) for table in tables) + 1
        batch = StepBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            sequence_of_row=torch.tensor(owners),
            starts=tuple(starts),
            lengths=tuple(lengths),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
            slots=torch.zeros(len(chunks), dtype=torch.int64),
            keep_from=(0,) * len(chunks),
            lookback=torch.zeros(len(chunks), 0, dtype=torch.int64),
            image_mask=torch.zeros(len(tokens), dtype=torch.bool),
            image_embeddings=None,
            logit_rows=torch.arange(len(tokens)),
        )
        return list(self.model.forward(batch, self.pool).split(lengths))

    def run(self, key: int, ids: Sequence[int], chunk: int) -> torch.Tensor:
        """A whole sequence in chunks → logits [len(ids), vocab]."""
        parts = [self.step([(key, ids[first : first + chunk])])[0] for first in range(0, len(ids), chunk)]
        return torch.cat(parts)

    def row_bytes(self, key: int) -> torch.Tensor:
        return self.pool.rows[torch.tensor(self.sequences[key].rows)]


@dataclass(frozen=True)
class TinyFolder:
    """A saved random model, and transformers' own instance of it in float32."""

    path: Path
    oracle: Any

    def load(self, **settings: Any) -> Model:
        return load_model(self.path, ModelSettings(**{"block_tokens": 16, **settings}))

    def oracle_logits(self, ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.oracle(input_ids=torch.tensor([list(ids)])).logits[0]
        return logits


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyFolder]:
    """Factory of random folders: ``make_tiny(q_lora_rank=None, …)``; equal arguments share one folder."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle (extra dev)")
    made: dict[str, TinyFolder] = {}

    def make(seed: int = 0, **changes: Any) -> TinyFolder:
        key = repr((seed, sorted(changes.items())))
        if key not in made:
            torch.manual_seed(seed)
            config = transformers.DeepseekV3Config(**(BASE | changes))
            oracle = transformers.DeepseekV3ForCausalLM(config).float().eval()
            for name, tensor in oracle.state_dict().items():
                # Large enough that attention is peaked and routing decisions differ between tokens.
                scale = 0.3 if tensor.dim() > 1 else 0.2
                noise = torch.randn(tensor.shape) * scale
                tensor.copy_(1 + noise if "norm" in name else noise)
            path = tmp_path_factory.mktemp("v3")
            oracle.save_pretrained(path)
            made[key] = TinyFolder(path, oracle)
        return made[key]

    return make


@pytest.fixture
def driver() -> Callable[..., Driver]:
    return Driver
