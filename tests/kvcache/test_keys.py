"""Keys: golden values, completeness (L2), chunked = one-shot, and a plain twin written from the spec's sentence."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kvcache.keys import (
    ImageSpan,
    KeyChain,
    KeyFieldError,
    block_keys,
    namespace,
    root_key,
    snapshot_key,
    tenant_salt,
)

MODEL, LAYOUT, TOKENIZER = b"m" * 32, b"l" * 32, b"t" * 32
SECRET = b"s" * 32
SALT = tenant_salt(SECRET, "default")
ROOT = root_key(MODEL, LAYOUT, TOKENIZER, SALT)
CAT, DOG = hashlib.sha256(b"cat").digest(), hashlib.sha256(b"dog").digest()


def plain_keys(parent: bytes, ids: Sequence[int], block_tokens: int, spans: Sequence[ImageSpan] = ()) -> list[bytes]:
    """Twin: the sentence of spec/protocol.md, one block at a time, no state."""
    keys = []
    for first in range(0, len(ids) - block_tokens + 1, block_tokens):
        block = ids[first : first + block_tokens]
        fields = [parent, b"".join(struct.pack("<I", token) for token in block)]
        for span in spans:
            covered = [p for p in range(first, first + block_tokens) if span.start <= p < span.start + span.length]
            if covered:
                fields.append(struct.pack("<II", covered[0] - first, covered[0] - span.start) + span.digest)
        message = b"headrace.block.1" + b"".join(struct.pack("<Q", len(field)) + field for field in fields)
        parent = hashlib.sha256(message).digest()
        keys.append(parent)
    return keys


def test_golden_values() -> None:
    """L2: pinned. A change here orphans every stored block: it must be deliberate, with a new domain tag."""
    assert SALT.hex() == "7c58d45182235a7cd6f278d1d4457860a0ca940d1e469f0187861ac9d028af4b"
    assert (
        namespace(MODEL, LAYOUT, TOKENIZER).hex() == "3f09937db37a8bff71ecf960704428683ea45677bfa3d87c5b7384bf922a6f17"
    )
    assert ROOT.hex() == "234f2c5e7b65eeac1d00aa59ff6972c92ecb6613ab13145cb76d788a074a6aa3"
    ids = list(range(300))
    first, second = block_keys(ROOT, ids, 128)
    assert first.hex() == "79fe6d0284c14c4469fe396e1fbf98cebc55e9a15c41f1e4d876d54a2c26b7f5"
    assert second.hex() == "307f564b50fa5e73fad6ca011424dfb2d509ef5e5c7cbbc7ed8630af312e690d"
    assert (
        block_keys(ROOT, ids, 128, [ImageSpan(100, 60, CAT)])[1].hex()
        == "413813e7fbba27e54d5e84e7a4a9d8aa18bf7cf76f7ff507883d30caa4d68ee1"
    )
    assert snapshot_key(second, 134).hex() == "852629b2901e4733b66e0dd1aa968395d650f0062869ab2abd344e8d13461e58"


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[ImageSpan], int]:
    """Token ids, ordered spans and a block size."""
    ids = draw(st.lists(st.integers(0, 2**32 - 1), max_size=60))
    spans: list[ImageSpan] = []
    position = 0
    while position < len(ids) and draw(st.booleans()):
        start = position + draw(st.integers(0, 8))
        length = draw(st.integers(1, 20))
        if start >= len(ids):
            break
        spans.append(ImageSpan(start, length, draw(st.sampled_from([CAT, DOG]))))
        position = start + length
    return ids, spans, draw(st.sampled_from([1, 3, 8, 16]))


@given(sequences())
def test_equal_to_the_plain_twin(case: tuple[list[int], list[ImageSpan], int]) -> None:
    ids, spans, block_tokens = case
    assert list(block_keys(ROOT, ids, block_tokens, spans)) == plain_keys(ROOT, ids, block_tokens, spans)


@given(sequences(), st.data())
def test_chunked_equals_one_shot(case: tuple[list[int], list[ImageSpan], int], data: st.DataObject) -> None:
    ids, spans, block_tokens = case
    chain, keys, position = KeyChain(ROOT, block_tokens), [], 0
    while position < len(ids):
        end = position + data.draw(st.integers(1, 13))
        keys += chain.extend(ids[position:end], [span for span in spans if position <= span.start < min(end, len(ids))])
        position = min(end, len(ids))
        assert chain.num_tokens == position
        assert chain.num_blocks == len(keys)
    assert tuple(keys) == block_keys(ROOT, ids, block_tokens, spans)
    assert chain.last_key == (keys[-1] if keys else ROOT)


@given(sequences(), st.data())
def test_a_worker_extends_from_the_parent_it_is_given(
    case: tuple[list[int], list[ImageSpan], int], data: st.DataObject
) -> None:
    """spec/protocol.md: workers never see the salt; a parent key in the middle of a span is enough to go on."""
    ids, spans, block_tokens = case
    whole = block_keys(ROOT, ids, block_tokens, spans)
    first = data.draw(st.integers(0, len(whole)))
    cut = first * block_tokens
    chain = KeyChain(
        whole[first - 1] if first else ROOT,
        block_tokens,
        first_block=first,
        open_spans=[span for span in spans if span.start < cut < span.end],
    )
    assert chain.extend(ids[cut:], [span for span in spans if span.start >= cut]) == whole[first:]


@given(sequences(), st.data())
def test_any_change_changes_this_key_and_all_after(
    case: tuple[list[int], list[ImageSpan], int], data: st.DataObject
) -> None:
    """L2: a differing token, tenant or parent gives differing keys from that block on, and only from there."""
    ids, spans, block_tokens = case
    whole = block_keys(ROOT, ids, block_tokens, spans)
    if not whole:
        return
    at = data.draw(st.integers(0, len(whole) * block_tokens - 1))
    changed = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
    other = block_keys(ROOT, changed, block_tokens, spans)
    block = at // block_tokens
    assert whole[:block] == other[:block]
    assert not set(whole[block:]) & set(other)
    stranger = root_key(MODEL, LAYOUT, TOKENIZER, tenant_salt(SECRET, "other"))
    assert not set(whole) & set(block_keys(stranger, ids, block_tokens, spans))


@given(sequences(), st.data())
def test_differing_media_give_differing_keys(case: tuple[list[int], list[ImageSpan], int], data: st.DataObject) -> None:
    """L2, spec §20.11: ids are equal, the image's digest or place differs."""
    ids, spans, block_tokens = case
    keyed = [span for span in spans if span.start < len(ids) // block_tokens * block_tokens]
    if not keyed:
        return
    span = data.draw(st.sampled_from(keyed))
    swapped = [ImageSpan(s.start, s.length, DOG if s.digest == CAT else CAT) if s is span else s for s in spans]
    whole, other = block_keys(ROOT, ids, block_tokens, spans), block_keys(ROOT, ids, block_tokens, swapped)
    block = span.start // block_tokens
    assert whole[:block] == other[:block]
    assert not set(whole[block:]) & set(other[block:])


def test_media_offsets_enter_the_key() -> None:
    """L2: the same digest at another offset of the block, or another offset in the span, is another key."""
    ids = [7] * 16
    at_0, at_1 = (block_keys(ROOT, ids, 8, [ImageSpan(start, 12, CAT)]) for start in (0, 1))
    assert at_0[0] != at_1[0]
    parent = at_0[0]
    crossing = [
        KeyChain(parent, 8, first_block=1, open_spans=[ImageSpan(start, 12, CAT)]).extend(ids[8:]) for start in (0, 1)
    ]
    assert crossing[0] != crossing[1]
    assert block_keys(ROOT, ids, 8) != at_0


def test_every_field_of_the_root_counts() -> None:
    """L2: model, layout, tokenizer, tenant and sharing domain."""
    roots = {
        ROOT,
        root_key(b"x" * 32, LAYOUT, TOKENIZER, SALT),
        root_key(MODEL, b"x" * 32, TOKENIZER, SALT),
        root_key(MODEL, LAYOUT, b"x" * 32, SALT),
        root_key(MODEL, LAYOUT, TOKENIZER, b"x" * 32),
        root_key(LAYOUT, MODEL, TOKENIZER, SALT),
        namespace(MODEL, LAYOUT, TOKENIZER),
    }
    assert len(roots) == 7
    salts = {
        tenant_salt(SECRET, "ab"),
        tenant_salt(SECRET, "a", "b"),
        tenant_salt(SECRET, "", "ab"),
        tenant_salt(b"z" * 32, "ab"),
    }
    assert len(salts) == 4


def test_snapshot_keys_differ_by_ring_and_from_block_keys() -> None:
    (key,) = block_keys(ROOT, [1, 2], 2)
    assert len({key, snapshot_key(key, 22), snapshot_key(key, 134)}) == 3


@pytest.mark.parametrize("bad", [[-1], [2**32], ["a"], [1.5], [None]])
def test_bad_token_ids_are_refused_and_change_nothing(bad: list[int]) -> None:
    """L13: a −1 token is an error of that request, not a crash and not another key."""
    chain = KeyChain(ROOT, 2)
    chain.extend([1])
    with pytest.raises(KeyFieldError):
        chain.extend(bad)
    assert chain.extend([2]) == block_keys(ROOT, [1, 2], 2)


@pytest.mark.parametrize(
    "spans",
    [
        [ImageSpan(0, 1, CAT)],
        [ImageSpan(6, 1, CAT)],
        [ImageSpan(4, 1, CAT), ImageSpan(3, 1, CAT)],
        [ImageSpan(3, 2, CAT), ImageSpan(4, 1, DOG)],
    ],
    ids=["before", "beyond", "unordered", "overlapping"],
)
def test_misplaced_spans_are_refused_and_change_nothing(spans: list[ImageSpan]) -> None:
    chain = KeyChain(ROOT, 2)
    chain.extend([1, 2])
    with pytest.raises(KeyFieldError):
        chain.extend([3, 4, 5], spans)
    assert chain.extend([3, 4]) == block_keys(ROOT, [1, 2, 3, 4], 2)[1:]


def test_bad_fields_are_refused() -> None:
    with pytest.raises(KeyFieldError):
        ImageSpan(-1, 1, CAT)
    with pytest.raises(KeyFieldError):
        ImageSpan(0, 0, CAT)
    with pytest.raises(KeyFieldError):
        ImageSpan(0, 1, b"short")
    with pytest.raises(KeyFieldError):
        ImageSpan(2**32 - 1, 2, CAT)
    with pytest.raises(KeyFieldError):
        tenant_salt(b"short", "tenant")
    with pytest.raises(KeyFieldError):
        tenant_salt(SECRET, "")
    with pytest.raises(KeyFieldError):
        KeyChain(b"short", 128)
    with pytest.raises(KeyFieldError):
        KeyChain(ROOT, 0)
    with pytest.raises(KeyFieldError):
        KeyChain(ROOT, 8, first_block=1, open_spans=[ImageSpan(0, 8, CAT)])
    with pytest.raises(KeyFieldError):
        snapshot_key(ROOT, 0)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=0, max_size=20))
def test_partial_blocks_have_no_key(ids: list[int]) -> None:
    assert len(block_keys(ROOT, ids, 8)) == len(ids) // 8
