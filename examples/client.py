"""A client made from proto/ alone, with nothing but grpcio and grpcio-tools.

python examples/client.py HOST:PORT 'What is the capital of France?'
"""

import sys
import tempfile
from importlib import import_module
from pathlib import Path

import grpc
from grpc_tools import protoc

PROTO = Path(__file__).resolve().parents[1] / "proto"


def main(address: str, question: str) -> None:
    with tempfile.TemporaryDirectory() as stubs:
        package = Path(stubs, "headrace", "v1")
        package.mkdir(parents=True)
        for folder in (package, package.parent):
            (folder / "__init__.py").touch()
        files = [f"headrace/v1/{name}.proto" for name in ("common", "inference")]
        protoc.main(["protoc", f"-I{PROTO}", f"--python_out={stubs}", f"--grpc_python_out={stubs}", *files])
        sys.path.insert(0, stubs)
        pb = import_module("headrace.v1.inference_pb2")
        services = import_module("headrace.v1.inference_pb2_grpc")
    part = pb.ContentPart(text=question)
    message = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=[part])
    request = pb.GenerateRequest(prompt=pb.Prompt(chat=pb.ChatPrompt(messages=[message])))
    request.sampling.temperature = 0
    request.stop.max_tokens = 64
    with grpc.insecure_channel(address) as channel:
        for event in services.InferenceServiceStub(channel).Generate(request, timeout=120):
            print(event.tokens.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
