"""The committed stubs of SeaweedFS's volume server are those of the .proto beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from google.protobuf import descriptor_pb2

from headrace.services.worker.tier._weed import volume_server_pb2

ROOT = Path(__file__).parents[4]
SOURCE = "headrace/services/worker/tier/_weed/volume_server.proto"


def test_generated_code_is_that_of_the_proto_file(tmp_path: Path) -> None:
    out = tmp_path / "volume_server.binpb"
    # In a process of its own: protoc's library and NIXL's cannot live in one.
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"--descriptor_set_out={out}", SOURCE]
    subprocess.run(command, check=True)
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto.FromString(volume_server_pb2.DESCRIPTOR.serialized_pb)
    for one in (fresh, committed):
        for message in one.message_type:
            for field in message.field:
                field.ClearField("json_name")
    assert fresh == committed
    assert fresh.package == "volume_server_pb"
