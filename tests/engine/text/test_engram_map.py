"""Engram's token map (spec §13); the golden case engram/token_map compares a whole map."""

from __future__ import annotations

import json

from headrace.engine.text.engram_map import engram_token_map


def tokenizer_of(words: list[str], specials: list[str]) -> str:
    added = [
        {"id": len(words) + i, "content": word, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for i, word in enumerate(specials)
    ]  # fmt: skip
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []},
        }
    )


def test_texts_that_differ_in_dress_share_an_id() -> None:
    # Ġ is a space, Ċ a newline, Ã© the two bytes of é, Ã alone half a character
    words = ["a", "A", "Ġa", "ĠA", "Ã©", "E", "Ġ", "Ċ", "ĠĠ", "Ã", "b"]
    assert engram_token_map(tokenizer_of(words, ["<s>", "<S>"])) == [0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 5, 5]
