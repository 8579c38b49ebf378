"""wire.py: what rides on the wire's opaque fields comes back whole or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.transfer.peers import ProcessIdentity
from headrace.kvcache.transfer.pushes import Outcome, TerminalNotice
from headrace.kvcache.transfer.wire import (
    Envelope,
    MalformedBytes,
    decode_envelope,
    decode_notice,
    encode_envelope,
    encode_notice,
)

NOTICE = TerminalNotice("a.0.kv.17", "request-é", 3, 17, Outcome.OK, 1 << 40)
ENVELOPE = Envelope(b"\x00\xffwire", ProcessIdentity("boot", "pid:[1]", 42, 99), (1, 7), (("cpu", 1 << 47, 0),))


def test_round_trips() -> None:
    assert decode_notice(encode_notice(NOTICE), "sender").sender == "sender"
    assert decode_notice(encode_notice(NOTICE), "") == NOTICE
    assert decode_envelope(encode_envelope(ENVELOPE)) == ENVELOPE


@pytest.mark.parametrize("length", range(len(encode_notice(NOTICE))))
def test_truncated_notices_are_refused(length: int) -> None:
    """L1: truncated is not the same."""
    with pytest.raises(MalformedBytes):
        decode_notice(encode_notice(NOTICE)[:length], "")


@given(st.integers(0, len(encode_envelope(ENVELOPE)) - 1))
def test_truncated_envelopes_are_refused(length: int) -> None:
    """L1."""
    with pytest.raises(MalformedBytes):
        decode_envelope(encode_envelope(ENVELOPE)[:length])


@given(st.binary(max_size=64))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    """L13: whatever a peer sends, the answer is MalformedBytes and nothing else."""
    for decode in (lambda: decode_notice(b"HRN1" + data, ""), lambda: decode_envelope(b"HRE1" + data)):
        with pytest.raises(MalformedBytes):
            decode()


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(MalformedBytes):
        decode_notice(encode_notice(NOTICE) + b"\x00", "")
