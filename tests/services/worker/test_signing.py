"""Transfer parameters that the cluster did not make, or that were changed since, are worth nothing (L1, L25)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.services.runtime.errors import FailedPrecondition, PermissionDenied
from headrace.services.runtime.settings_load import SettingsError
from headrace.services.worker.signing import SKEW_S, UNSIGNED, Signer, derive
from headrace.services.worker.transfer_settings import TransferSection
from headrace.v1 import common_pb2, encoder_pb2, inference_pb2

SECRETS = tuple(letter * 32 for letter in "ab")
INTERNAL = ("TransferHandle", "TransferAgent", "EmbeddingHandle", "LandingPart", "RequestSpec")


class Wall:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def peer(name: str = "decode-0") -> common_pb2.PeerId:
    return common_pb2.PeerId(replica_id=name, incarnation="0" * 32)


def handle() -> common_pb2.TransferHandle:
    return common_pb2.TransferHandle(
        transfer_id="t1",
        receiver=peer(),
        rank=0,
        id=common_pb2.AttemptId(request_id="r", attempt=1),
        generation=3,
        layout_fingerprint=b"l" * 32,
        model_fingerprint=b"m" * 32,
        payload=common_pb2.PAYLOAD_KIND_KV,
        parts=[common_pb2.LandingPart(blocks=[0, 1], rows=[7, 9], slot=2)],
        row_bytes=4096,
        slot_bytes=128,
        checksum=common_pb2.CHECKSUM_KIND_XXH3_64,
        metadata_version=1,
        time_left_ms=5000,
    )


def agent() -> common_pb2.TransferAgent:
    region = common_pb2.LandingRegion(base_address=4096, item_bytes=64, items=3, memory=common_pb2.MEMORY_KIND_HOST)
    return common_pb2.TransferAgent(
        owner=peer(),
        agent_name="0.x",
        agent_metadata=b"keys",
        metadata_version=1,
        regions=[region],
        model=common_pb2.ModelIdentity(name="m", model_fingerprint=b"m" * 32),
        checksums=[common_pb2.CHECKSUM_KIND_XXH3_64],
    )


def embedding() -> encoder_pb2.EmbeddingHandle:
    return encoder_pb2.EmbeddingHandle(
        owner=peer("encoder-0"),
        endpoint="h:1",
        id=common_pb2.AttemptId(request_id="r", attempt=1),
        lease_id="7",
        model_fingerprint=b"m" * 32,
        rows=5,
        row_bytes=64,
        dtype="float32",
    )


Check = Callable[[Signer, Any], None]
KINDS: dict[str, tuple[Callable[[], Any], str, Check]] = {
    "handle": (handle, "handle", lambda signer, wire: signer.check_handle(wire, "landing", fresh=True)),
    "agent": (agent, "agent", lambda signer, wire: signer.check_agent(wire, "agent")),
    "embedding": (embedding, "embedding", lambda signer, wire: signer.check_embedding(wire, "embeddings[0]")),
}


def changes(message: Message) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Every way to change one field of a message, nested and repeated ones too; by the path of the field."""
    for field in message.DESCRIPTOR.fields:
        name = field.name
        if name in ("signature", "time_left_ms"):
            continue
        if field.is_repeated:

            def add(target: Any, name: str = name, nested: bool = field.message_type is not None) -> None:
                values = getattr(target, name)
                values.add() if nested else values.append(1)

            yield f"{name}+", add
            if field.message_type is not None:
                for path, change in changes(getattr(message, name)[0]):
                    yield f"{name}.{path}", lambda target, name=name, change=change: change(getattr(target, name)[0])
        elif field.message_type is not None:
            for path, change in changes(getattr(message, name)):
                yield f"{name}.{path}", lambda target, name=name, change=change: change(getattr(target, name))
        else:

            def other(target: Any, name: str = name, kind: int = field.type) -> None:
                value = getattr(target, name)
                setattr(target, name, not value if kind == FieldDescriptor.TYPE_BOOL else value + _more(value))

            yield name, other


def _more(value: Any) -> Any:
    return 1 if isinstance(value, int) else (b"x" if isinstance(value, bytes) else "x")


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_changed_is_found(kind: str) -> None:
    """Each field of each message, those inside others too: a new field that nobody signs fails here."""
    make, sign, check = KINDS[kind]
    signer = Signer(SECRETS[:1], wall=Wall())
    good = getattr(signer, sign)(make())
    check(signer, good)
    paths = []
    for path, change in changes(good):
        paths.append(path)
        bad = type(good).FromString(good.SerializeToString())
        change(bad)
        with pytest.raises(PermissionDenied):
            check(signer, bad)
    assert len(paths) >= 9
    for forged in (make(), type(good).FromString(good.SerializeToString())):
        forged.signature = b"\0" * 32 if forged.signature else b""
        with pytest.raises(PermissionDenied, match="signed"):
            check(signer, forged)
    with pytest.raises(PermissionDenied):
        check(Signer(SECRETS[1:]), good)


@given(st.binary(max_size=64), st.sampled_from(sorted(KINDS)))
@settings(max_examples=300, deadline=None)
def test_no_signature_is_guessed(signature: bytes, kind: str) -> None:
    make, _, check = KINDS[kind]
    wire = make()
    wire.signature = signature
    with pytest.raises(PermissionDenied):
        check(Signer(SECRETS[:1]), wire)


def test_parts_cannot_slide_into_each_other() -> None:
    """Rows of one part moved to another, or blocks to rows, are another grant."""
    signer = Signer(SECRETS[:1], wall=Wall())
    good = handle()
    good.parts.add(blocks=[2], rows=[11])
    signer.handle(good)
    moved = common_pb2.TransferHandle.FromString(good.SerializeToString())
    moved.parts[0].blocks.append(2)
    moved.parts[0].rows.append(11)
    del moved.parts[1].blocks[:], moved.parts[1].rows[:]
    with pytest.raises(PermissionDenied):
        signer.check_handle(moved, "landing", fresh=False)
    absent = common_pb2.TransferHandle.FromString(good.SerializeToString())
    absent.parts[0].ClearField("slot")
    with pytest.raises(PermissionDenied):
        signer.check_handle(absent, "landing", fresh=False)


def test_a_stale_handle_begins_nothing_and_ends_what_it_began() -> None:
    """Its deadline, and a minute for clocks that differ. time_left_ms counts down on the way and is not signed."""
    wall = Wall()
    signer = Signer(SECRETS[:1], wall=wall)
    wire = signer.handle(handle())
    wire.time_left_ms = 1
    wall.now += 5 + SKEW_S - 0.1
    signer.check_handle(wire, "landing", fresh=True)
    wall.now += 0.2
    with pytest.raises(FailedPrecondition, match="over"):
        signer.check_handle(wire, "landing", fresh=True)
    signer.check_handle(wire, "landing", fresh=False)


def test_a_secret_is_exchanged_while_all_run(tmp_path: Path) -> None:
    """First everybody believes the new one, then it signs, then the old one goes."""
    now = 0.0
    files = [tmp_path / name for name in ("one", "two")]
    for file in files:
        file.write_text(SECRETS[0] + "\n")
    one, two = (Signer(file=file, monotonic=lambda: now) for file in files)
    for first, second in (((0, 1), (0,)), ((1, 0), (0, 1)), ((1,), (1, 0)), ((1,), (1,))):
        for file, order in zip(files, (first, second), strict=True):
            file.write_text("\n".join(SECRETS[index] for index in order))
        now += 2
        two.check_agent(one.agent(agent()), "agent")
        one.check_agent(two.agent(agent()), "agent")
    files[0].write_text("short\n")
    now += 2
    two.check_agent(one.agent(agent()), "agent")  # the former secret stays in force


def test_without_a_secret_nothing_is_signed_and_with_tls_one_is_needed(tmp_path: Path) -> None:
    assert UNSIGNED.handle(handle()) == handle()
    UNSIGNED.check_handle(handle(), "landing", fresh=True)
    assert not UNSIGNED.signs
    assert TransferSection().signer(tls=False) is UNSIGNED
    with pytest.raises(SettingsError, match="secret_file"):
        TransferSection().signer(tls=True)
    (tmp_path / "secret").write_text("x" * 31)
    with pytest.raises(SettingsError, match="32"):
        TransferSection(secret_file=tmp_path / "secret").signer(tls=True)
    with pytest.raises(SettingsError, match="cannot read"):
        TransferSection(secret_file=tmp_path / "absent").signer(tls=True)
    assert len(derive("x" * 32)) == 32


def test_no_transfer_parameter_can_come_in_at_the_edge() -> None:
    """L25: no message that a client sends can hold one, at any depth."""
    seen: set[str] = set()

    def walk(kind: Descriptor) -> None:
        if kind.full_name in seen:
            return
        seen.add(kind.full_name)
        for field in kind.fields:
            if field.message_type is not None:
                walk(field.message_type)

    for method in inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods:
        walk(method.input_type)
    assert "headrace.v1.Prompt" in seen
    assert not {f"headrace.v1.{name}" for name in INTERNAL} & seen


def test_negative_numbers_are_refused_like_other_changes() -> None:
    """L13: an enum of a message may be any 32-bit number."""
    signer = Signer(SECRETS)
    wire, other = signer.handle(handle()), signer.agent(agent())
    wire.payload = -1  # type: ignore[assignment]
    other.regions[0].memory = -(2**31)  # type: ignore[assignment]
    with pytest.raises(PermissionDenied):
        signer.check_handle(wire, "landing", fresh=False)
    with pytest.raises(PermissionDenied):
        signer.check_agent(other, "agent")
    other.CopyFrom(agent())
    other.checksums.append(-1)  # type: ignore[arg-type]
    with pytest.raises(PermissionDenied):
        signer.check_agent(other, "agent")
