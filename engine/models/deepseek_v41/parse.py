"""config.json → V41Config, checked.

Two file forms are read: the Hugging Face one with nested text and vision parts, and the checkpoint's own flat form
(``config_flat.json``).
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.engine.models.deepseek_v41.config import DraftConfig, EngramConfig, RopeConfig, V41Config
from headrace.engine.models.deepseek_v41.config_file import ConfigError, Fields, flatten

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "moe_intermediate_size",
    "num_experts",
    "experts_per_token",
    "window",
    "index_heads",
    "index_head_dim",
    "index_topk",
    "hc_mult",
    "hc_sinkhorn_iters",
)


def parse_config(values: Mapping[str, object]) -> V41Config:
    """Build the config from the parsed JSON of either form.

    Raises:
        ConfigError: another architecture, quantisation or option than this family has, or a broken rule of spec §1.2.
    """
    config = _build(Fields(flatten(values)))
    _validate(config)
    return config


def _build(f: Fields) -> V41Config:
    rope_dim = f.integer("rope_head_dim")
    engram_layers = f.integers("engram_layer_ids", ())
    drafts = f.integer("n_mtp_layers", 0)
    return V41Config(
        vocab_size=f.integer("vocab_size"),
        hidden_size=f.integer("dim"),
        num_layers=f.integer("n_layers"),
        num_heads=f.integer("n_heads"),
        head_dim=f.integer("head_dim"),
        rope_head_dim=rope_dim,
        q_lora_rank=f.integer("q_lora_rank"),
        o_groups=f.integer("o_groups"),
        o_lora_rank=f.integer("o_lora_rank"),
        moe_intermediate_size=f.integer("moe_inter_dim"),
        num_experts=f.integer("n_routed_experts"),
        experts_per_token=f.integer("n_activated_experts"),
        route_scale=f.number("route_scale"),
        swiglu_limit=f.number("swiglu_limit", 0.0),
        norm_eps=f.number("norm_eps"),
        window=f.integer("window_size"),
        compress_ratios=f.integers("compress_ratios"),
        kv_source_layers=f.integers("kv_source_layers"),
        index_source_layers=f.integers("index_source_layers"),
        index_heads=f.integer("index_n_heads"),
        index_head_dim=f.integer("index_head_dim"),
        index_topk=f.integer("index_topk"),
        candidate_source_layer=f.optional_integer("candidate_source_layer"),
        candidate_topk_blocks=f.integer("candidate_topk_blocks", 0),
        candidate_block_size=f.integer("candidate_block_size", 0),
        hc_mult=f.integer("hc_mult"),
        hc_sinkhorn_iters=f.integer("hc_sinkhorn_iters"),
        hc_eps=f.number("hc_eps"),
        rope=RopeConfig(f.number("rope_theta"), rope_dim, 0, 1.0, 0.0, 0.0),
        compress_rope=RopeConfig(
            f.number("compress_rope_theta"),
            rope_dim,
            f.integer("original_seq_len", 0),
            f.number("rope_factor", 1.0),
            f.number("beta_fast", 32.0),
            f.number("beta_slow", 1.0),
        ),
        engram=_engram(f, engram_layers) if engram_layers else None,
        draft=_draft(f, drafts) if drafts else None,
        image_token_id=f.optional_integer("image_token_id"),
        bos_token_id=f.integer("bos_token_id", 0),
        eos_token_ids=f.integers("eos_token_id", (1,)),
        pad_token_id=f.integer("pad_token_id", 2),
        max_positions=f.integer("max_position_embeddings", 1048576),
    )


def _engram(f: Fields, layers: tuple[int, ...]) -> EngramConfig:
    return EngramConfig(
        layers=layers,
        num_embeddings=f.integers("engram_num_embeddings"),
        max_ngram=f.integer("engram_max_ngram_size"),
        heads=f.integer("engram_n_heads"),
        head_dim=f.integer("engram_head_dim"),
        vocab_size=f.integer("engram_vocab_size"),
        compressed_vocab_size=f.integer("engram_compressed_vocab_size"),
        pad_token_id=f.integer("engram_pad_id"),
    )


def _draft(f: Fields, layers: int) -> DraftConfig:
    return DraftConfig(
        layers=layers,
        block_size=f.integer("dspark_block_size"),
        noise_token_id=f.integer("dspark_noise_token_id"),
        target_layers=f.integers("dspark_target_layer_ids"),
        markov_rank=f.integer("dspark_markov_rank"),
        experts=f.integer("dspark_n_routed_experts"),
        experts_per_token=f.integer("dspark_n_activated_experts"),
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _validate(c: V41Config) -> None:
    """Rules of spec §1.2 and §1.4 that shapes and sharing depend on."""
    for name in _POSITIVE:
        _require(getattr(c, name) > 0, f"{name} must be positive")
    _require(c.num_heads % c.o_groups == 0, "o_groups must divide the number of heads")
    _require(c.experts_per_token <= c.num_experts, "more experts per token than experts")
    rd = c.rope_head_dim
    _require(rd > 0 and rd % 2 == 0, "qk_rope_head_dim must be even and positive")
    _require(rd <= min(c.head_dim, c.index_head_dim), "qk_rope_head_dim exceeds head_dim or index_head_dim")
    expected = c.num_layers + c.draft_layers
    _require(len(c.compress_ratios) == expected, f"compress_ratios needs {expected} values (backbone + draft layers)")
    _require(min(c.compress_ratios) >= 0, "compress_ratios must not be negative")
    _require(not any(c.compress_ratios[c.num_layers :]), "draft layers have no compressed KV: their ratio must be 0")
    _validate_sources(c)
    if c.engram:
        _require(len(c.engram.num_embeddings) == len(c.engram.layers), "one engram_num_embeddings per Engram layer")
        _require(all(0 <= i < c.first_consumer for i in c.engram.layers), "Engram layers must be producers")
        _require(c.engram.max_ngram >= 2, "engram_max_ngram_size must be at least 2")
        _require(0 <= c.engram.pad_token_id < c.vocab_size, "engram_pad_token_id is outside the vocabulary")
    if c.draft:
        targets = c.draft.target_layers
        _require(all(0 <= i < c.num_layers for i in targets), "draft targets must be backbone layers")
        _require(len({i >= c.first_consumer for i in targets}) <= 1, "draft targets lie on both sides of the boundary")


def _validate_sources(c: V41Config) -> None:
    for name in ("kv_source_layers", "index_source_layers"):
        sources: tuple[int, ...] = getattr(c, name)
        _require(list(sources) == sorted(set(sources)), f"{name} must be ascending and unique")
        _require(all(0 <= s < c.num_layers and c.compress_ratios[s] > 0 for s in sources), f"{name}: r must be > 0")
    ratios = c.compress_ratios
    for kind in (k for k in c.layers if k.ratio > 0):
        where = f"layer {kind.index}"
        kv, index = kind.kv_source, kind.index_source
        if kv is None or ratios[kv] != kind.ratio:
            raise ConfigError(f"{where}: its kv source must exist and have the same compress ratio")
        if index is None or c.layers[index].kv_source != kv:
            raise ConfigError(f"{where}: its index source must exist and lie inside the same kv segment")
    if c.candidate_source_layer is not None:
        source = c.candidate_source_layer
        _require(source in c.index_source_layers, "the candidate source must be an index source")
        _require(c.candidate_topk_blocks > 0 and c.candidate_block_size > 0, "candidate sizes must be positive")
        users = [k for k in c.layers if k.searches_candidates]
        _require(all(k.ratio == ratios[source] for k in users), "candidate consumers must share the source's ratio")
