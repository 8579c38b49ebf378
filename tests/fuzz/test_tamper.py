"""What is done to handles makes them worthless, whatever the handle, and a gain from one is a violation."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from headrace.services.runtime.errors import FailedPrecondition, PermissionDenied
from headrace.services.worker.signing import Signer
from headrace.v1 import common_pb2, decode_pb2, encoder_pb2
from tests.fuzz.handles import Attacks
from tests.fuzz.send import Outcome
from tests.fuzz.tamper import TAMPERINGS, Old, Tampering, sign

SIGNER = Signer(("k" * 32,))


def peer(name: str) -> common_pb2.PeerId:
    return common_pb2.PeerId(replica_id=name, incarnation=name[0] * 32)


def landing(name: str) -> common_pb2.TransferHandle:
    return common_pb2.TransferHandle(
        transfer_id=name,
        receiver=peer("decode-0"),
        id=common_pb2.AttemptId(request_id=name, attempt=1),
        parts=[common_pb2.LandingPart(blocks=[0], rows=[len(name)], slot=1)],
        payload=common_pb2.PAYLOAD_KIND_KV,
        time_left_ms=1000,
    )


def agent(name: str) -> common_pb2.TransferAgent:
    region = common_pb2.LandingRegion(base_address=4096, items=3)
    return common_pb2.TransferAgent(owner=peer(name), agent_name=name, agent_metadata=name.encode(), regions=[region])


def embedding() -> encoder_pb2.EmbeddingHandle:
    identifier = common_pb2.AttemptId(request_id="mine", attempt=1)
    return encoder_pb2.EmbeddingHandle(owner=peer("encoder-0"), id=identifier, lease_id="l", rows=3)


def old() -> Old:
    reserved = decode_pb2.ReserveResponse(
        landing=SIGNER.handle(landing("other")), agent=SIGNER.agent(agent("decode-0"))
    )
    return Old(common_pb2.RequestSpec(id=reserved.landing.id), reserved, SIGNER.agent(agent("prefill-0")))


def check(message: Message) -> None:
    if isinstance(message, common_pb2.TransferHandle):
        SIGNER.check_handle(message, "it", fresh=True)
    elif isinstance(message, common_pb2.TransferAgent):
        SIGNER.check_agent(message, "it")
    elif isinstance(message, encoder_pb2.EmbeddingHandle):
        SIGNER.check_embedding(message, "it")


@given(
    st.sampled_from([one for one in TAMPERINGS if not one.genuine]),
    st.sampled_from([lambda: landing("mine"), lambda: agent("decode-0"), embedding]),
    st.integers(0, 2**32 - 1),
)
def test_what_is_not_genuine_is_refused(tampering: Tampering, make: Any, seed: int) -> None:
    """L25: forged, changed and crossed parameters fail by their signature."""
    message = make()
    sign(message, SIGNER)
    check(message)
    tampering.apply(message, old(), random.Random(seed), SIGNER)
    if isinstance(message, common_pb2.TransferAgent) and message == old().agent:
        return  # another replica's agent, which is what it says
    with pytest.raises(PermissionDenied):
        check(message)


def test_a_genuine_handle_out_of_time_is_stale() -> None:
    (tampering,) = [one for one in TAMPERINGS if one.name == "out of time"]
    message = SIGNER.handle(landing("mine"))
    tampering.apply(message, old(), random.Random(1), SIGNER)
    with pytest.raises(FailedPrecondition):
        check(message)


def test_a_gain_is_a_violation_unless_it_gives_nothing() -> None:
    unused: Any = None
    attacks = Attacks(unused, unused, random.Random(1))
    forged, replayed = TAMPERINGS[0], TAMPERINGS[-1]
    good = Outcome("DecodeService/EndTransfer", "decode-0", True, status="OK")
    attacks._note("EndTransfer", replayed, good, gained="a word said twice")
    attacks._note("Run", replayed, Outcome("PrefillService/Run", "prefill-0", True, status="OK"))
    assert not attacks.violations
    attacks._note("EndTransfer", forged, good, gained="another's transfer ended")
    attacks._note("Run", replayed, good, gained="a hand-over")
    attacks._note("Commit", forged, Outcome("DecodeService/Commit", "decode-0", True, status="UNKNOWN"))
    assert [str(one["why"]).split()[0] for one in attacks.violations] == ["the", "the", "a"]
    assert attacks.sent == 5
