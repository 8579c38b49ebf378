"""A tokenizer for made-up models: one token per byte, and every special token of the V4.1 encoding.

It lets a model with random weights take real prompts through the real text path.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from headrace.engine.text.tokenizer import BYTE_OF_CHARACTER
from headrace.engine.text.v41_tokens import v41_special_spellings

PAD_SPELLING = "<｜▁pad▁｜>"
NOISE_SPELLING = "<｜noise｜>"


@dataclass(frozen=True)
class ByteTokenizerFile:
    """A tokenizer.json and the ids that a config needs from it. BOS, EOS, PAD are 0, 1, 2 as in the published model."""

    serialized: str
    vocab_size: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    noise_token_id: int
    """Id for dspark_noise_token_id: a token that no text encodes to."""


def make_byte_tokenizer() -> ByteTokenizerFile:
    """Ids: 0–2 BOS, EOS, PAD; 3–258 the bytes 0–255; then the other special tokens."""
    bos, eos, *others = v41_special_spellings()
    specials = [bos, eos, PAD_SPELLING]
    vocabulary = {spelling: index for index, spelling in enumerate(specials)}
    for character, byte in BYTE_OF_CHARACTER.items():
        vocabulary[character] = len(specials) + byte
    for spelling in [*others, NOISE_SPELLING]:
        vocabulary[spelling] = len(vocabulary)
    added = [
        {
            "id": vocabulary[spelling],
            "content": spelling,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for spelling in [*specials, *others, NOISE_SPELLING]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])), "merges": []},
    }
    image = others[[*others].index("<｜image｜>")]
    return ByteTokenizerFile(
        serialized=json.dumps(document, ensure_ascii=False, indent=1),
        vocab_size=len(vocabulary),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=vocabulary[image],
        noise_token_id=vocabulary[NOISE_SPELLING],
    )
