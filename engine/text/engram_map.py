"""The compressed token map of V4.1's Engram: ids whose texts differ only in dress share one (spec §13)."""

from __future__ import annotations

import tokenizers
from tokenizers import Regex, normalizers

_LONE_SPACE = "\ue000"
"""Private-use stand-in that carries a text of exactly one space through the strip."""

_NORMALISE = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex("[ \t\r\n]+"), " "),
        normalizers.Replace(Regex("^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)


def engram_token_map(serialized: str) -> list[int]:
    """Compressed id of every id of a tokenizer.json, special tokens included, numbered by first appearance.

    The number of distinct values is the config's ``engram_compressed_vocab_size``: hash multipliers depend on it.
    """
    tokenizer = tokenizers.Tokenizer.from_str(serialized)
    numbers: dict[str, int] = {}
    return [
        numbers.setdefault(_key(tokenizer, token), len(numbers))
        for token in range(tokenizer.get_vocab_size(with_added_tokens=True))
    ]


def _key(tokenizer: tokenizers.Tokenizer, token: int) -> str:
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:  # part of a character: its raw vocabulary string stands for it
        return str(tokenizer.id_to_token(token))
    return str(_NORMALISE.normalize_str(text)) or text
