"""The re-expression of grouped-query models as MLA is exact: random tiny llamas against transformers, no download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch

from headrace.engine.batch import StepBatch
from headrace.engine.converters.folder import write_json, write_safetensors
from headrace.engine.converters.gguf_llama import LlamaFile, LlamaNumbers
from headrace.engine.converters.llama_as_v3 import MoEShape, plan_tensors, v3_config
from headrace.engine.loading import ModelSettings, load_model
from headrace.kvcache.pool import KVPool

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass
class RandomLlama:
    """Stands in for LlamaFile: the same numbers and tensors, from a random transformers model."""

    model: Any
    numbers: LlamaNumbers

    @property
    def tied(self) -> bool:
        return bool(self.model.config.tie_word_embeddings)

    def tensor(self, name: str) -> torch.Tensor:
        state: dict[str, torch.Tensor] = self.model.state_dict()
        top = {
            "token_embd.weight": "model.embed_tokens",
            "output_norm.weight": "model.norm",
            "output.weight": "lm_head",
        }
        if name in top:
            return state[f"{top[name]}.weight"]
        _, layer, kind, _ = name.split(".")
        return state[f"model.layers.{layer}.{NAMES[kind]}.weight"]


def random_llama(heads: int, kv_heads: int, tied: bool) -> RandomLlama:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle (extra dev)")
    torch.manual_seed(heads * 10 + kv_heads)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=heads * 32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    numbers = LlamaNumbers(3, heads * 32, heads, kv_heads, 32, 48, 61, 256, 10_000.0, 1e-6, 1, 2)
    return RandomLlama(model, numbers)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tied", "kind"),
    [(4, 2, True, "split"), (3, 3, False, "split"), (4, 1, False, "copy"), (6, 3, True, "copy")],
)
def test_the_function_is_the_same(
    heads: int, kv_heads: int, tied: bool, kind: Literal["split", "copy"], native: bool, tmp_path: Path
) -> None:
    """split: the experts together are the FFN. copy: whatever the router chooses, the answer is the FFN's."""
    llama = random_llama(heads, kv_heads, tied)
    file = cast("LlamaFile", llama)
    shape = MoEShape(kind, experts=4)
    write_safetensors(tmp_path / "model.safetensors", plan_tensors(file, shape, torch.float32), lambda amount: None)
    write_json(tmp_path / "config.json", v3_config(file, shape, "float32"))
    model = load_model(tmp_path, ModelSettings(native_kernels=native, block_tokens=16))
    ids = torch.randint(0, 61, (45,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = llama.model(input_ids=ids.unsqueeze(0)).logits[0]
    pool = KVPool(model.layout, num_rows=5)
    tables = torch.tensor([pool.allocate_rows(3, "test")])
    got = []
    for start, end in ((0, 30), (30, 44), (44, 45)):
        batch = StepBatch(
            token_ids=ids[start:end],
            positions=torch.arange(start, end),
            sequence_of_row=torch.zeros(end - start, dtype=torch.int64),
            starts=(start,),
            lengths=(end - start,),
            block_tables=tables,
            slots=torch.zeros(1, dtype=torch.int64),
            keep_from=(0,),
            lookback=torch.zeros(1, 0, dtype=torch.int64),
            image_mask=torch.zeros(end - start, dtype=torch.bool),
            image_embeddings=None,
            logit_rows=torch.arange(end - start),
        )
        got.append(model.forward(batch, pool))
    assert (torch.cat(got) - want).abs().max() <= 1e-5 * want.abs().max()


def test_a_split_that_does_not_divide_is_refused() -> None:
    llama = random_llama(2, 1, True)
    with pytest.raises(ValueError, match="cannot be split"):
        v3_config(cast("LlamaFile", llama), MoEShape("split", experts=5), "float32")
