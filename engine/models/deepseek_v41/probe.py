"""Looking inside a forward pass: golden tests read and replace intermediate tensors through it. Off by default."""

from __future__ import annotations

import torch

from headrace.engine.models.deepseek_v41.rows import RowSet


class Probe:
    """Base of probes; does nothing. Every call names the tensor, its layer, and the rows it stands for.

    Names: ``embedding`` [n, d] (layer 0); ``layer_input`` and ``layer_output`` streams [n, hc, d]; ``pre_input`` and
    ``pre_output`` [n, hc] float32; ``attention_input`` and ``attention_output`` [n, d]; ``feature`` [n, d] (draft
    targets); ``scores`` [n, J] and ``candidates`` bool [n, blocks], one call per group of sequences;
    ``selection`` int64 [n, index_topk].
    """

    def record(self, name: str, layer: int, rows: RowSet, value: torch.Tensor) -> None:
        """Called with a tensor that was computed."""

    def replace(self, name: str, layer: int, rows: RowSet, value: torch.Tensor) -> torch.Tensor:
        """Called with an input about to be used; what comes back is used (teacher forcing)."""
        return value
