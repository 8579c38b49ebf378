"""Names of cached bytes: namespaces, tenant salts, block keys, snapshot keys (L2; spec/protocol.md, Identity).

All digests are SHA-256 over a domain tag and fields that are each prefixed with their length as LE64, so no two
different field lists give one message. Two prefixes share a key only if model, layout, tokenizer, tenant, every token
and every image before the block's end are the same; a hit therefore needs no second comparison of token ids. No torch,
no numpy: the router computes keys.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TIER_FORMAT = "headrace.tier.1"
"""Version of what a key names (row bytes, record format). A change makes every stored block foreign."""
KEY_BYTES = 32
MIN_SECRET_BYTES = 16

_BLOCK = b"headrace.block.1"
_ROOT = b"headrace.root.1"
_NAMESPACE = b"headrace.namespace.1"
_SNAPSHOT = b"headrace.snapshot.1"
_LE64 = struct.Struct("<Q")
_SPAN = struct.Struct("<II")
_MAX_TOKEN = 2**32 - 1

Key = bytes
"""32 bytes."""


class KeyFieldError(ValueError):
    """A field cannot stand in a key; the message says which and why. Nothing was hashed."""


@dataclass(frozen=True, order=True)
class ImageSpan:
    """Placeholder positions of one image, delimiters included."""

    start: int
    """Absolute position of the span's first token."""
    length: int
    digest: bytes
    """32 bytes: digest of content and resize options, whatever decides the embedding rows."""

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 1:
            raise KeyFieldError(
                f"image span at {self.start} of {self.length} tokens: start ≥ 0 and length ≥ 1 are needed"
            )
        if self.start + self.length > _MAX_TOKEN:
            raise KeyFieldError(f"image span at {self.start} of {self.length} tokens ends past 2³² positions")
        _digest_field("image digest", self.digest)

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.start + self.length


def tenant_salt(secret: bytes, tenant: str, sharing_domain: str = "") -> bytes:
    """HMAC-SHA-256(secret, LE64 length ‖ tenant ‖ LE64 length ‖ sharing domain), 32 bytes (L25).

    Members of a declared sharing domain are salted with tenant "" and the domain's name, so that they meet; everybody
    else with their own tenant and no domain. Only the router knows the secret.

    Raises:
        KeyFieldError: the secret is shorter than 16 bytes, or tenant and domain are both empty.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise KeyFieldError(f"the salt secret has {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed")
    if not tenant and not sharing_domain:
        raise KeyFieldError("tenant and sharing domain are both empty: name one")
    return hmac.digest(secret, _field(tenant.encode()) + _field(sharing_domain.encode()), "sha256")


def namespace(model_fingerprint: bytes, row_fingerprint: bytes, tokenizer_digest: bytes) -> bytes:
    """What all tenants of one model share: drop it and every key under it is dead (spec/kv_tier.md, Identity)."""
    return _hash(_NAMESPACE, _identity_fields(model_fingerprint, row_fingerprint, tokenizer_digest))


def root_key(model_fingerprint: bytes, row_fingerprint: bytes, tokenizer_digest: bytes, salt: bytes) -> Key:
    """The parent of a sequence's first block.

    Args: 32 bytes each: model_fp, KVLayout.row_fingerprint ("layout_fp without ring"), digest of tokenizer and chat
    template, tenant_salt.
    """
    _digest_field("salt", salt)
    return _hash(_ROOT, [*_identity_fields(model_fingerprint, row_fingerprint, tokenizer_digest), salt])


def snapshot_key(block_key: Key, ring_tokens: int) -> Key:
    """Key of the snapshot at the end of ``block_key``'s block, for the wire ring of ``ring_tokens`` positions."""
    _digest_field("block key", block_key)
    if not 0 < ring_tokens <= _MAX_TOKEN:
        raise KeyFieldError(f"ring_tokens {ring_tokens} must be a positive 32-bit number: this layout has no snapshots")
    return _hash(_SNAPSHOT, [block_key, struct.pack("<I", ring_tokens)])


def block_keys(
    parent: Key, token_ids: Sequence[int], block_tokens: int, spans: Iterable[ImageSpan] = ()
) -> tuple[Key, ...]:
    """Keys of every full block of ``token_ids``, whose first token stands at position 0 under root ``parent``."""
    return KeyChain(parent, block_tokens).extend(token_ids, spans)


class KeyChain:
    """Keys of one sequence, extended as tokens come. Any chunking gives the keys of one call over everything.

    Block key = SHA-256("headrace.block.1" ‖ len ‖ parent key ‖ len ‖ token ids as LE32 ‖ per image span touching the
    block, in order: len ‖ LE32 offset of the span in the block ‖ LE32 offset in the span ‖ content digest). For a span
    that begins in an earlier block the first offset is 0.
    """

    def __init__(
        self, parent: Key, block_tokens: int, *, first_block: int = 0, open_spans: Iterable[ImageSpan] = ()
    ) -> None:
        """Start after block ``first_block`` − 1, whose key is ``parent`` (the root for 0).

        open_spans: spans that begin before this point and reach beyond it.
        """
        _digest_field("parent key", parent)
        if block_tokens < 1 or first_block < 0:
            raise KeyFieldError(f"block_tokens {block_tokens} must be ≥ 1 and first_block {first_block} ≥ 0")
        self._parent = parent
        self._block_tokens = block_tokens
        self._next_block = first_block
        self._tail = b""
        start = first_block * block_tokens
        self._spans: list[ImageSpan] = []
        for span in open_spans:
            if not span.start < start < span.end or self._spans:
                raise KeyFieldError(
                    f"open span {span.start}…{span.end} does not cross position {start}, or is not alone"
                )
            self._spans.append(span)
        self._last_span_end = self._spans[-1].end if self._spans else 0

    @property
    def last_key(self) -> Key:
        """Key of the last full block, or the parent given at the start."""
        return self._parent

    @property
    def num_tokens(self) -> int:
        """Positions seen, from 0."""
        return self._next_block * self._block_tokens + len(self._tail) // 4

    @property
    def num_blocks(self) -> int:
        """Full blocks, from 0, keyed so far."""
        return self._next_block

    def extend(self, token_ids: Sequence[int], spans: Iterable[ImageSpan] = ()) -> tuple[Key, ...]:
        """Append tokens; returns the keys of the blocks that they complete.

        ``spans`` begin inside ``token_ids`` (positions num_tokens and on), in order, without overlap; one may reach
        beyond them into tokens that follow later.

        Raises:
            KeyFieldError: a token id is no unsigned 32-bit number (−1 …), or a span is out of place. Nothing changed.
        """
        data = self._tail + _token_bytes(token_ids)
        start, end = self.num_tokens, self.num_tokens + len(token_ids)
        added: list[ImageSpan] = []
        reached = max(self._last_span_end, start)
        for span in spans:
            if not reached <= span.start < end:
                raise KeyFieldError(
                    f"image span at {span.start} must begin in {reached}…{end - 1}: in order, inside the new tokens"
                )
            added.append(span)
            reached = span.end
        if added:
            self._last_span_end = reached
        live = self._spans + added
        size = 4 * self._block_tokens
        header = _BLOCK + _LE64.pack(KEY_BYTES)
        length = _LE64.pack(size)
        parent, block = self._parent, self._next_block
        keys: list[Key] = []
        sha256 = hashlib.sha256
        for begin in range(0, len(data) - size + 1, size):
            message = header + parent + length + data[begin : begin + size]
            if live:
                fields, live = self._span_fields(block, live)
                message += fields
            parent = sha256(message).digest()
            keys.append(parent)
            block += 1
        self._tail = data[len(keys) * size :]
        self._parent, self._next_block, self._spans = parent, block, live
        return tuple(keys)

    def _span_fields(self, block: int, live: list[ImageSpan]) -> tuple[bytes, list[ImageSpan]]:
        """Fields of the spans that touch ``block``, and the spans that still matter after it."""
        first, last = block * self._block_tokens, (block + 1) * self._block_tokens
        fields = b"".join(
            _field(_SPAN.pack(max(span.start - first, 0), max(first - span.start, 0)) + span.digest)
            for span in live
            if span.start < last and span.end > first
        )
        return fields, [span for span in live if span.end > last]


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    try:
        ids = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise KeyFieldError(f"token ids must be integers in 0…2³²−1: {error}") from None
    if ids.itemsize != 4:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _identity_fields(model_fingerprint: bytes, row_fingerprint: bytes, tokenizer_digest: bytes) -> list[bytes]:
    _digest_field("model fingerprint", model_fingerprint)
    _digest_field("row fingerprint", row_fingerprint)
    _digest_field("tokenizer digest", tokenizer_digest)
    return [TIER_FORMAT.encode(), model_fingerprint, row_fingerprint, tokenizer_digest]


def _digest_field(name: str, value: bytes) -> None:
    if not isinstance(value, bytes) or len(value) != KEY_BYTES:
        raise KeyFieldError(f"{name} must be {KEY_BYTES} bytes")


def _field(value: bytes) -> bytes:
    return _LE64.pack(len(value)) + value


def _hash(domain: bytes, fields: Iterable[bytes]) -> bytes:
    return hashlib.sha256(domain + b"".join(_field(value) for value in fields)).digest()
