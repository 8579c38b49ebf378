"""Small layouts of both families that the tests of this folder share."""

from __future__ import annotations

from headrace.kvcache.layout import v3_layout, v41_layout

V41 = v41_layout(
    n_layers=4,
    n_draft_layers=1,
    compress_ratios=[0, 2, 1, 1, 0],
    kv_source_layers=[1, 2],
    head_dim=32,
    index_head_dim=32,
    window=8,
    block_tokens=16,
)
V3 = v3_layout(num_layers=2, kv_lora_rank=8, qk_rope_head_dim=4, kv_dtype="float32", block_tokens=16)
