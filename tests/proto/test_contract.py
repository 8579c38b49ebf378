"""The wire contract: lint, generated code, and properties every message must have."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor

from headrace.v1 import common_pb2, events_pb2, inference_pb2
from tests.proto.modules import MODULES

ROOT = Path(__file__).resolve().parents[2]
FILES: list[FileDescriptor] = [module.DESCRIPTOR for module in MODULES]


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("headrace_proto_generate", ROOT / "proto" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def buf(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    program = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert program is not None, "buf is missing: install the dev extra (package buf-bin)"
    return subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def reachable(message: Descriptor) -> list[Descriptor]:
    """The message and all messages that its fields can hold."""
    found = {message.full_name: message}
    waiting = [message]
    while waiting:
        for field in waiting.pop().fields:
            inner = field.message_type
            if inner is not None and inner.full_name not in found:
                found[inner.full_name] = inner
                waiting.append(inner)
    return list(found.values())


def test_generated_code_is_current() -> None:
    assert load_generator().differences() == []


def test_generated_code_check_sees_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = load_generator()
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copytree(ROOT / "headrace" / "v1", tmp_path / "headrace" / "v1")
    source = tmp_path / "proto" / "headrace" / "v1" / "events.proto"
    source.write_text(source.read_text() + "\n// Added.\nmessage Added {\n  // A number.\n  uint32 number = 1;\n}\n")
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    monkeypatch.setattr(generator, "SOURCES", tmp_path / "proto")
    assert generator.differences() == ["events_pb2.py", "events_pb2.pyi"]


def test_every_proto_file_is_checked_here() -> None:
    on_disk = {str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto")}
    assert on_disk == {file.name for file in FILES}


def test_buf_builds_and_lints() -> None:
    for arguments in (("build",), ("lint",), ("format", "--diff", "--exit-code")):
        done = buf(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


def test_buf_lint_sees_a_violation(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    source = tmp_path / "proto" / "headrace" / "v1" / "events.proto"
    source.write_text(source.read_text() + "\nmessage Uncommented {}\n")
    done = buf("lint", cwd=tmp_path)
    assert done.returncode != 0
    assert "Uncommented" in done.stdout


def test_every_service_of_the_design_is_there() -> None:
    services = {
        f"{service.name}.{method.name}"
        for file in FILES
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert services >= {
        "InferenceService.Generate",
        "EncoderService.Encode",
        "EncoderService.Push",
        "PrefillService.Run",
        "DecodeService.Reserve",
        "DecodeService.Commit",
        "DecodeService.Attach",
        "RegistryService.Register",
        "RegistryService.Watch",
        "ControlService.Status",
        "ControlService.Drain",
        "EventService.Watch",
        "EventService.Snapshot",
        "CachePeerService.Lease",
    }


def test_handle_names_all_that_both_ends_compare() -> None:
    """L1: a handle carries incarnation, request, attempt, generation and layout fingerprint, and a checksum kind."""
    fields = set(common_pb2.TransferHandle.DESCRIPTOR.fields_by_name)
    assert fields >= {
        "transfer_id",
        "receiver",
        "id",
        "generation",
        "layout_fingerprint",
        "model_fingerprint",
        "checksum",
    }
    assert set(common_pb2.PeerId.DESCRIPTOR.fields_by_name) == {"replica_id", "incarnation"}
    assert set(common_pb2.AttemptId.DESCRIPTOR.fields_by_name) == {"request_id", "attempt"}


def test_clients_cannot_name_a_tenant() -> None:
    """L25: the tenant comes from the credential, never from the body."""

    fields = {
        field.full_name for message in reachable(inference_pb2.GenerateRequest.DESCRIPTOR) for field in message.fields
    }
    assert "headrace.v1.SamplingParams.seed" in fields
    assert not [name for name in fields if "tenant" in name or "salt" in name or "root_key" in name]


def test_events_carry_keys_only() -> None:
    """L25: events carry keys, never token ids."""
    fields = [
        field.full_name for message in events_pb2.DESCRIPTOR.message_types_by_name.values() for field in message.fields
    ]
    assert fields
    assert not [name for name in fields if "token_id" in name]
