"""What an encoder tells the registry of itself."""

from __future__ import annotations

import pytest

from headrace.kvcache.transfer.base import PeerDescription
from headrace.services.encoder.main import published_encoder
from headrace.services.encoder.settings import EncoderSettings
from headrace.services.runtime.errors import PermissionDenied
from headrace.services.runtime.registry.base import Capacity, Replica, Role
from headrace.services.worker.signing import Signer
from headrace.v1 import common_pb2

MODEL = b"M" * 32
INCARNATION = "0" * 31 + "1"


def test_the_agent_is_signed() -> None:
    """L25: as every worker's, so that a peer that checks it believes it, and only as it was made."""
    plain = Replica(
        id="encoder-0",
        incarnation=INCARNATION,
        role=Role.ENCODER,
        data_centre="local",
        host="here",
        endpoint="127.0.0.1:1",
    )
    described = PeerDescription(INCARNATION, 0, f"0.{INCARNATION}", b"metadata", 3, (), None, MODEL)
    signer = Signer(("s" * 32,))
    published = published_encoder(plain, EncoderSettings(), MODEL, described, Capacity(embedding_bytes=1), signer)
    agent = common_pb2.TransferAgent.FromString(published.ranks[0].agent)
    assert agent.owner == common_pb2.PeerId(replica_id="encoder-0", incarnation=INCARNATION)
    signer.check_agent(agent, "agent")
    agent.agent_name += "x"
    with pytest.raises(PermissionDenied):
        signer.check_agent(agent, "agent")
