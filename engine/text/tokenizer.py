"""Byte-level BPE tokenizers of a model folder, with a strict line between text and special tokens.

PyPI `tokenizers` does the BPE. Two instances of it are kept: the full one, and one without the added vocabulary.
Text that comes from a user goes through the second, so that "<|im_end|>" typed by a user is encoded as plain text and
can never close a turn (spec/protocol.md, "Events to the client").
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.text.errors import TextError, UnsupportedTokenizer

if TYPE_CHECKING:
    import tokenizers


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in a byte-level vocabulary (the GPT-2 alphabet): character → byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHARACTER = _byte_level_alphabet()


class Tokenizer:
    """A byte-level tokenizer: text to ids, and ids to bytes.

    `specials` are the added tokens of the file, by spelling. Ids run from 0 to `size` − 1; ids a model may produce
    beyond it (padding of the vocabulary) have no bytes.
    """

    def __init__(self, serialized: str) -> None:
        """Build from the text of a tokenizer.json. Raises UnsupportedTokenizer if it is not byte-level BPE."""
        # Not at the top: an engine that is fed token ids runs where only torch is installed (bench/gpu).
        import tokenizers

        try:
            document = json.loads(serialized)
            self._full: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(serialized)
            plain = {**document, "added_tokens": [], "post_processor": None}
            self._plain: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(json.dumps(plain))
        except Exception as error:
            raise UnsupportedTokenizer(f"tokenizer.json cannot be read: {error}") from error
        decoder = document.get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise UnsupportedTokenizer(f"tokenizer decoder is {decoder.get('type')!r}; only ByteLevel can be streamed")
        self.specials: dict[str, int] = {token["content"]: token["id"] for token in document.get("added_tokens", [])}
        self._special_ids = frozenset(
            token["id"] for token in document.get("added_tokens", []) if token.get("special", False)
        )
        self.size = max(self._full.get_vocab(with_added_tokens=True).values()) + 1
        self.digest = hashlib.sha256(serialized.encode()).digest()

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read `folder`/tokenizer.json. Raises TextError when the file is absent."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TextError(f"no tokenizer.json in {folder}; requests to this model must send token ids")
        return cls(path.read_text(encoding="utf-8"))

    @cached_property
    def _bytes(self) -> list[bytes | None]:
        table: list[bytes | None] = [None] * self.size
        for spelling, token in self._full.get_vocab(with_added_tokens=True).items():
            try:
                table[token] = bytes(BYTE_OF_CHARACTER[character] for character in spelling)
            except KeyError:
                table[token] = spelling.encode()
        for spelling, token in self.specials.items():
            table[token] = spelling.encode()
        return table

    @cached_property
    def longest_token(self) -> int:
        """Most bytes of text that one id can stand for: a text of B bytes has at least B ÷ this many tokens."""
        return max(len(token) for token in self._bytes if token)

    def encode_plain(self, text: str) -> list[int]:
        """Encode text in which no spelling of a special token means anything."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def encode_trusted(self, text: str) -> list[int]:
        """Encode text whose special-token spellings are meant (templates, operators' prompts)."""
        ids: list[int] = self._full.encode(text, add_special_tokens=False).ids
        return ids

    def special_id(self, spelling: str) -> int:
        """Id of an added token. Raises TextError if the tokenizer has none of that spelling."""
        try:
            return self.specials[spelling]
        except KeyError:
            raise TextError(f"the tokenizer has no added token {spelling!r}") from None

    def is_special(self, token: int) -> bool:
        """Whether decoding skips this id unless special tokens are asked for."""
        return token in self._special_ids

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one id; empty for an id outside the vocabulary (L13: such an id is never an error here)."""
        if not 0 <= token < self.size:
            return b""
        return self._bytes[token] or b""

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of a whole sequence; invalid UTF-8 becomes U+FFFD."""
        kept = (token for token in tokens if not (skip_special and self.is_special(token)))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")
