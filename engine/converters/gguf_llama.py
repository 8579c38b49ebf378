"""Reading a GGUF file of the llama kind: numbers, tensors as float32 in Hugging Face's order, tokenizer, template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

_CONTROL = 3
"""GGUF token type of special tokens (gguf.TokenType.CONTROL)."""


@dataclass(frozen=True)
class LlamaNumbers:
    """The architecture's numbers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    rope_theta: float
    rms_eps: float
    bos: int
    eos: int


class LlamaFile:
    """An opened GGUF file; tensors are dequantised one by one when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError when the file is no llama model with a byte-level BPE vocabulary."""
        self._reader = gguf.GGUFReader(path)
        self._last: tuple[str, torch.Tensor] | None = None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self._field("general.architecture") != "llama" or self._field("tokenizer.ggml.model") != "gpt2":
            raise ValueError(f"{path} is not a llama model with a byte-level BPE vocabulary")
        heads, hidden = int(self._field("llama.attention.head_count")), int(self._field("llama.embedding_length"))
        self.numbers = LlamaNumbers(
            layers=int(self._field("llama.block_count")),
            hidden=hidden,
            heads=heads,
            kv_heads=int(self._field("llama.attention.head_count_kv")),
            head_dim=hidden // heads,
            intermediate=int(self._field("llama.feed_forward_length")),
            vocab=len(self._field("tokenizer.ggml.tokens")),
            context=int(self._field("llama.context_length")),
            rope_theta=float(self._field("llama.rope.freq_base")),
            rms_eps=round(float(self._field("llama.attention.layer_norm_rms_epsilon")), 12),
            bos=int(self._field("tokenizer.ggml.bos_token_id")),
            eos=int(self._field("tokenizer.ggml.eos_token_id")),
        )

    @property
    def chat_template(self) -> str:
        return str(self._field("tokenizer.chat_template"))

    @property
    def tied(self) -> bool:
        return "output.weight" not in self._tensors

    def tensor(self, name: str) -> torch.Tensor:
        """Float32, [out, in] for matrices. Query and key rows come in half-split rope order.

        The last one is kept: converters ask for the parts of a tensor one after the other.
        """
        if self._last is None or self._last[0] != name:
            self._last = (name, self._dequantised(name))
        return self._last[1]

    def _dequantised(self, name: str) -> torch.Tensor:
        source = self._tensors[name]
        values = torch.from_numpy(numpy.array(gguf.quants.dequantize(source.data, source.tensor_type), numpy.float32))
        if name.endswith("attn_q.weight"):
            return self._half_split(values, self.numbers.heads)
        if name.endswith("attn_k.weight"):
            return self._half_split(values, self.numbers.kv_heads)
        return values

    def token(self, index: int) -> str:
        return str(self._field("tokenizer.ggml.tokens")[index])

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The vocabulary as a Hugging Face fast tokenizer; control tokens are its special tokens.

        The pre-tokenizer is SmolLM's (``tokenizer.ggml.pre`` = smollm): every digit apart, then GPT-2's pattern.
        """
        if self._field("tokenizer.ggml.pre") != "smollm":
            raise ValueError(f"pre-tokenizer {self._field('tokenizer.ggml.pre')!r} is not implemented, only smollm")
        spellings = [str(token) for token in self._field("tokenizer.ggml.tokens")]
        pairs = [str(merge).partition(" ") for merge in self._field("tokenizer.ggml.merges")]
        merges = [(left, right) for left, _, right in pairs]
        vocabulary = {spelling: index for index, spelling in enumerate(spellings)}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self._field("tokenizer.ggml.token_type")
        tokenizer.add_special_tokens(
            [
                tokenizers.AddedToken(spelling, special=True, normalized=False)
                for spelling, kind in zip(spellings, kinds, strict=True)
                if kind == _CONTROL
            ]
        )
        return tokenizer

    def _field(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise ValueError(f"the GGUF file has no {key}")
        return field.contents()

    @staticmethod
    def _half_split(matrix: torch.Tensor, heads: int) -> torch.Tensor:
        """GGUF pairs a llama head's lanes as (0, 1), (2, 3) …; Hugging Face has first halves, then second halves."""
        rows, width = matrix.shape
        return matrix.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)
