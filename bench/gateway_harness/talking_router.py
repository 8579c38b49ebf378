"""A process that answers InferenceService as a router would, and computes nothing: `python -m … ADDRESS_FILE`.

The model's name says how: `talk:RATE:SIZE` sends that many events a second to each stream, each of so many tokens;
rate 0: as many as are taken.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio

from headrace.engine.text.byte_tokenizer import make_byte_tokenizer
from headrace.services.runtime.callers import tell_caller
from headrace.services.runtime.files import write_whole
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc

FIRST_BYTE_ID = 3
_CALLER = inference_pb2.Caller(tenant="default")
WORD = FIRST_BYTE_ID + ord("a")
MODELS = ("talk:0:1", "talk:20:1", "talk:0:1024")


class TalkingRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Sends as decode does, where the size is 1."""

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        """See inference.proto."""
        rate, size = (int(part) for part in request.model.split(":")[1:])
        count = request.stop.max_tokens
        await tell_caller(context, _CALLER)
        yield inference_pb2.GenerateResponse(started=inference_pb2.StartedEvent(prompt_tokens=1))
        for offset in range(0, count, size):
            if rate and offset:
                await asyncio.sleep(1 / rate)
            tokens = common_pb2.TokensEvent(offset=offset, token_ids=[WORD] * size, text="a" * size)
            yield inference_pb2.GenerateResponse(tokens=tokens)
        finished = common_pb2.FinishedEvent(reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=count)
        yield inference_pb2.GenerateResponse(finished=finished)
        usage = common_pb2.Usage(prompt_tokens=1, computed_tokens=1, completion_tokens=count)
        yield inference_pb2.GenerateResponse(usage=usage)

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        """See inference.proto."""
        limits = inference_pb2.ModelLimits(context_tokens=1 << 31, max_tokens=1 << 31, max_n=1)
        models = [
            inference_pb2.Model(identity=common_pb2.ModelIdentity(name=name), limits=limits, eos_token_ids=[1])
            for name in MODELS
        ]
        return inference_pb2.ListModelsResponse(models=models, caller=_CALLER)


def make_folder(folder: Path) -> Path:
    """What a gateway reads of a model."""
    file = make_byte_tokenizer()
    (folder / "tokenizer.json").write_text(file.serialized, encoding="utf-8")
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


async def serve(address_file: Path) -> None:
    """Until killed."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(TalkingRouter(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    write_whole(address_file, f"127.0.0.1:{port}".encode(), 0o666)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
