"""What is done to transfer parameters, and whether anybody may be taken in. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from headrace.services.worker.signing import Signer
from headrace.v1 import common_pb2, decode_pb2, encoder_pb2
from tests.fuzz.mutate import Mutator, sites

FOREIGN: Final = Signer(("a secret of another cluster, or a guess",))


@dataclass
class Old:
    """Parameters that were good once, or are another's."""

    spec: common_pb2.RequestSpec
    reserved: decode_pb2.ReserveResponse
    agent: common_pb2.TransferAgent
    """Of another replica than decode."""


Apply = Callable[[Message, Old, random.Random, Signer], None]


@dataclass(frozen=True)
class Tampering:
    name: str
    apply: Apply
    replays: bool = False
    """Old parameters are shown as they are."""
    genuine: bool = False
    """Its signature is good, and covers what is shown."""

    def harmless(self, place: str) -> bool:
        """Success is no gain: the last word of a transfer that has ended, or is one's own, may be said again, at any
        time. Everything else has to be refused."""
        return self.genuine and place == "EndTransfer"


def sign(message: Message, signer: Signer) -> None:
    """As the message's maker does it."""
    if isinstance(message, common_pb2.TransferHandle):
        signer.handle(message)
    elif isinstance(message, common_pb2.TransferAgent):
        signer.agent(message)
    elif isinstance(message, encoder_pb2.EmbeddingHandle):
        signer.embedding(message)


def _forge(message: Message, other: Old, rng: random.Random, signer: Signer) -> None:
    """A signature that nobody made: none, noise, short, one bit off."""
    signature = message.signature  # type: ignore[attr-defined]
    place = rng.randrange(len(signature))
    flipped = signature[:place] + bytes([signature[place] ^ (1 << rng.randrange(8))]) + signature[place + 1 :]
    message.signature = rng.choice((b"", rng.randbytes(32), signature[:-1], signature + b"\0", flipped))  # type: ignore[attr-defined]


def _foreign(message: Message, other: Old, rng: random.Random, signer: Signer) -> None:
    """Signed with another secret."""
    sign(message, FOREIGN)


def _change(message: Message, other: Old, rng: random.Random, signer: Signer) -> None:
    """One signed field becomes another."""
    before = message.SerializeToString(deterministic=True)
    mutator = Mutator(rng)
    for _ in range(50):
        site = rng.choice([site for site in sites(message) if signed(site.path)])
        if site.field.type == Field.TYPE_MESSAGE:
            continue
        if site.field.is_repeated:
            values = getattr(site.owner, site.field.name)
            values.append(mutator.value(site.field))
        else:
            setattr(site.owner, site.field.name, mutator.value(site.field))
        if message.SerializeToString(deterministic=True) != before:
            return


def signed(path: str) -> bool:
    """Whether the signature covers a field: all but itself and the time that counts down on the way."""
    return path not in ("signature", "time_left_ms")


def _cross(message: Message, other: Old, rng: random.Random, signer: Signer) -> None:
    """Another request's parameters in place of these: whole, with their own good signature."""
    if isinstance(message, common_pb2.TransferHandle):
        message.CopyFrom(other.reserved.landing)
    elif isinstance(message, common_pb2.TransferAgent):
        message.CopyFrom(other.agent)
    else:
        message.id.CopyFrom(other.spec.id)  # type: ignore[attr-defined]


def _cross_part(message: Message, other: Old, rng: random.Random, signer: Signer) -> None:
    """Another request's rows, name or number under this signature."""
    if isinstance(message, common_pb2.TransferAgent):
        message.agent_metadata = other.agent.agent_metadata
        return
    if not isinstance(message, common_pb2.TransferHandle):
        _cross(message, other, rng, signer)
        return
    theirs = other.reserved.landing
    match rng.choice(("rows", "id", "transfer", "generation", "receiver")):
        case "rows":
            del message.parts[:]
            message.parts.extend(theirs.parts)
            message.parts[0].rows.append(0)
        case "id":
            message.id.CopyFrom(theirs.id)
        case "transfer":
            message.transfer_id = theirs.transfer_id
        case "generation":
            message.generation += 1
        case "receiver":
            message.receiver.incarnation = rng.randbytes(16).hex()


def _newer(message: Message, other: Old, rng: random.Random, signer: Signer) -> None:
    """The attempt's number raised or lowered, to outlive a later one."""
    if isinstance(message, common_pb2.TransferAgent):
        message.metadata_version += 1
        return
    identifier = message.id  # type: ignore[attr-defined]
    identifier.attempt = rng.choice((0, identifier.attempt + 1, 2**32 - 1))


def _expired(message: Message, other: Old, rng: random.Random, signer: Signer) -> None:
    """Another time under this signature: later, or long ago."""
    if isinstance(message, common_pb2.TransferHandle):
        message.expires_unix_ms = rng.choice((0, 1, message.expires_unix_ms + 3_600_000, 2**64 - 1))
    else:
        _forge(message, other, rng, signer)


def _over(message: Message, other: Old, rng: random.Random, signer: Signer) -> None:
    """Well signed, and its time is over: as one that was kept for later."""
    if isinstance(message, common_pb2.TransferHandle):
        past = Signer((), wall=lambda: 1.0)
        past._keys = signer._current()
        past.handle(message)
    else:
        _forge(message, other, rng, signer)


def _as_it_is(message: Message, other: Old, rng: random.Random, signer: Signer) -> None:
    """Nothing: whoever shows it chooses old parameters."""


TAMPERINGS: Final = (
    Tampering("forged signature", _forge),
    Tampering("another cluster's signature", _foreign),
    Tampering("changed field", _change),
    Tampering("changed field", _change),
    Tampering("another request's handle", _cross, genuine=True),
    Tampering("another request's part", _cross_part),
    Tampering("another attempt", _newer),
    Tampering("another time", _expired),
    Tampering("out of time", _over, genuine=True),
    Tampering("replayed", _as_it_is, replays=True, genuine=True),
    Tampering("replayed", _as_it_is, replays=True, genuine=True),
)
"""Twice: those of which there is more to try."""
