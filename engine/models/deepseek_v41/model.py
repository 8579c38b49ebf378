"""DeepSeek-V4.1 behind the engine's Model protocol: the whole forward pass (spec §4) over pool rows and slots."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from headrace.engine.batch import StepBatch
from headrace.engine.loading import ModelError, ModelSettings
from headrace.engine.models.deepseek_v41.cache import CacheViews, check_formats, make_codecs
from headrace.engine.models.deepseek_v41.checkpoint import Checkpoint
from headrace.engine.models.deepseek_v41.config import V41Config
from headrace.engine.models.deepseek_v41.engram import Engram, EngramContext, read_token_map
from headrace.engine.models.deepseek_v41.layer import Layer
from headrace.engine.models.deepseek_v41.parse import parse_config
from headrace.engine.models.deepseek_v41.probe import Probe
from headrace.engine.models.deepseek_v41.rows import RowSet, plan_rows
from headrace.engine.models.deepseek_v41.step import Step, frequencies
from headrace.engine.models.deepseek_v41.weights import V41Weights, load_weights
from headrace.kernels.modes import NumericMode, Numerics
from headrace.kernels.select import select
from headrace.kvcache.layout import EntryFormat, KVLayout, v41_layout
from headrace.kvcache.pool import KVPool


class DeepseekV41:
    """A loaded text model. Prefill chunks, decode rows and mixtures of both run through the one ``forward``."""

    def __init__(
        self,
        config: V41Config,
        weights: V41Weights,
        layout: KVLayout,
        numerics: Numerics,
        device: torch.device,
        token_map: torch.Tensor | None,
    ) -> None:
        check_formats(layout, numerics.mode)
        self.config = config
        self.layout = layout
        self.numerics = numerics
        self.device = device
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.context_tokens = config.max_positions
        self.lookback_tokens = config.lookback_tokens
        self.supports_replay = config.supports_replay
        self.image_token_id = config.image_token_id
        self.eos_token_ids = config.eos_token_ids
        self.probe: Probe | None = None
        self._weights = weights
        self._ops = select(device, batch_invariant=numerics.batch_invariant).ops
        self._codecs = make_codecs(layout, numerics.mode, self._ops)
        self._views: WeakKeyDictionary[KVPool, CacheViews] = WeakKeyDictionary()
        self._frequencies = frequencies(config.rope, device)
        self._compressed_frequencies = frequencies(config.compress_rope, device)
        self._engram = (
            EngramContext(config.engram, token_map, device) if config.engram and token_map is not None else None
        )
        self._layers = tuple(self._layer(i) for i in range(config.num_layers))

    def _layer(self, index: int) -> Layer:
        config, weights, kind = self.config, self._weights.layers[index], self.config.layers[index]
        engram = None
        if kind.engram is not None and weights.engram is not None:
            if self._engram is None:
                raise ModelError("the model has Engram layers and needs a token map")
            engram = Engram(config, kind.engram, weights.engram, self._engram.constants, self._ops)
        return Layer(config, kind, weights, engram, self._ops, quantised=self.numerics.mode.quantises_kv)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, pool: KVPool) -> torch.Tensor:
        """Run the batch's rows, write their KV, return logits [S, vocab] float32 of ``logit_rows``.

        Raises:
            ValueError: a batch that bounded replay cannot serve with this layer layout.
        """
        replayed = any(keep > 0 for keep in batch.keep_from)
        if replayed and not batch.mask_replay and not self.config.supports_replay:
            raise ValueError("bounded replay needs every kv source at or before the first consumer: use replay=off")
        rows = plan_rows(batch, self.layout)
        step = Step(
            rows, self.views_of(pool), batch.block_tables, self._frequencies, self._compressed_frequencies, self.probe
        )
        streams = self._embed(batch, step)
        pre = torch.zeros(streams.shape[:2], dtype=torch.float32, device=streams.device)
        pre[:, 0] = 1.0
        context = self._engram.of_step(batch, rows.chunk.starts) if self._engram else None
        for layer in self._layers:
            after = layer.forward(streams, pre, step, context, batch.image_mask)
            if after is None:
                return streams.new_zeros((0, self.vocab_size), dtype=torch.float32)
            streams, pre = after
        ran = rows.kept if self.config.first_consumer < self.config.num_layers else rows.all
        return self._logits(streams, pre, _rows_in(ran, batch))

    def views_of(self, pool: KVPool) -> CacheViews:
        """Typed views of a pool of this model's layout. Raises ModelError for another layout."""
        views = self._views.get(pool)
        if views is None:
            if pool.layout.fingerprint != self.layout.fingerprint:
                raise ModelError("the pool's layout is not this model's: build the pool from model.layout")
            views = self._views[pool] = CacheViews(pool, self._codecs)
        return views

    def _embed(self, batch: StepBatch, step: Step) -> torch.Tensor:
        """Embeddings [T, hc, d], one copy per stream; image positions take the batch's rows."""
        ids = batch.token_ids.clamp(0, self.vocab_size - 1)
        hidden = self._weights.embed[ids]
        if batch.image_embeddings is not None:
            rows = batch.image_embeddings.to(hidden.dtype)
            hidden = hidden.masked_scatter(batch.image_mask.unsqueeze(1), rows)
        step.record("embedding", 0, step.rows.all, hidden)
        return hidden.unsqueeze(1).repeat(1, self.config.hc_mult, 1)

    def _logits(self, streams: torch.Tensor, pre: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        hidden = self._ops.hyper_collapse(streams[rows], pre[rows])
        return self._ops.linear_fp32(
            self._ops.rms_norm(hidden, self._weights.norm, self.config.norm_eps), self._weights.head
        )


def _rows_in(ran: RowSet, batch: StepBatch) -> torch.Tensor:
    """``logit_rows`` as indices into the rows that ran."""
    if ran.picked is None:
        return batch.logit_rows
    place = torch.full((batch.num_tokens,), -1, dtype=torch.int64, device=ran.picked.device)
    place[ran.picked] = torch.arange(ran.count, device=place.device)
    rows = place[batch.logit_rows]
    torch._assert_async((rows >= 0).all())
    return rows


def layout_of(config: V41Config, *, entry_format: EntryFormat, block_tokens: int, backtracking: int) -> KVLayout:
    """The cache layout of a config (spec §17)."""
    return v41_layout(
        n_layers=config.num_layers,
        n_draft_layers=config.draft_layers,
        compress_ratios=config.compress_ratios,
        kv_source_layers=config.kv_source_layers,
        head_dim=config.head_dim,
        index_head_dim=config.index_head_dim,
        window=config.window,
        backtracking=backtracking,
        block_tokens=block_tokens,
        entry_format=entry_format,
    )


def load(folder: Path, config: dict[str, object], settings: ModelSettings) -> DeepseekV41:
    """Entry point of engine/loading.py.

    Raises:
        ModelError: config, tensors, token map or settings do not fit; the message names the field.
    """
    parsed = parse_config(config)
    numerics = _numerics(settings)
    layout = layout_of(
        parsed,
        entry_format=_entry_format(settings, numerics.mode),
        block_tokens=settings.block_tokens,
        backtracking=settings.backtracking,
    )
    check_formats(layout, numerics.mode)
    device = torch.device(settings.device)
    token_map = read_token_map(folder, parsed, parsed.engram) if parsed.engram else None
    weights = load_weights(Checkpoint(folder), parsed, numerics, device)
    return DeepseekV41(parsed, weights, layout, numerics, device, token_map)


def _entry_format(settings: ModelSettings, mode: NumericMode) -> EntryFormat:
    if settings.entry_format != "auto":
        return settings.entry_format
    return "native" if mode.quantises_kv else "float32"


def _numerics(settings: ModelSettings) -> Numerics:
    mode = NumericMode(settings.numeric_mode)
    wanted = "float32" if mode.activation_dtype == torch.float32 else "bfloat16"
    if settings.dtype not in ("auto", wanted):
        raise ModelError(f"dtype {settings.dtype}: numeric mode {mode} computes in {wanted}; leave dtype at auto")
    try:
        return Numerics(mode, settings.batch_invariant)
    except ValueError as error:
        raise ModelError(str(error)) from error
