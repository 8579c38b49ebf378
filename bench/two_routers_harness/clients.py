"""Clients that hold their requests open by not reading on: slow ones, as every server meets them.

Each has a tiny HTTP/2 window. Once it stops reading, the router cannot send on, grants decode no more credit for the
request, and decode pauses it: its slot stays booked until the client reads again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from headrace.cli.ask import token_prompt
from headrace.services.runtime.errors import ResourceExhausted, from_rpc_error
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc

WINDOW_BYTES = 512
MAX_TOKENS = 8
LOGPROBS = 20
"""Of every token, so that few events fill the window."""
TIMEOUT_S = 180.0
OPTIONS = (
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


@dataclass
class Round:
    """What 64 clients met, before their requests were let go and after."""

    accepted: int = 0
    """Had their first token while all were held open."""
    refused: int = 0
    """Were told RESOURCE_EXHAUSTED meanwhile."""
    retry_after_s: list[float] = field(default_factory=list)
    """What these were told."""
    other_errors: list[str] = field(default_factory=list)
    finished: int = 0
    """Had all their tokens in the end."""
    retries: int = 0
    """Refusals of second and later tries."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def settled(self) -> int:
        return self.accepted + self.refused + len(self.other_errors)

    async def note(self, **counts: int) -> None:
        async with self.changed:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)
            self.changed.notify_all()


def request(name: str, index: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt=token_prompt([20 + (index * 7 + place) % 90 for place in range(12)]),
        sampling=common_pb2.SamplingParams(temperature=0.0, logprobs=LOGPROBS),
        stop=common_pb2.StopParams(max_tokens=MAX_TOKENS, ignore_eos=True),
        request_id=name,
    )


async def client(router: str, name: str, index: int, outcome: Round, let_go: asyncio.Event) -> None:
    """Ask, hold the request open until `let_go`, read it to its end; refused, come back when told to."""
    tries = 0
    async with grpc.aio.insecure_channel(router, options=OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        while True:
            tries += 1
            try:
                await _one(stub.Generate(request(f"{name}.{tries}", index), timeout=TIMEOUT_S), outcome, let_go)
                return
            except grpc.aio.AioRpcError as failed:
                error = from_rpc_error(failed)
                if not isinstance(error, ResourceExhausted) or not error.retry_after_s:
                    outcome.other_errors.append(f"{name}: {failed.code().name} {error}")
                    await outcome.note()
                    return
            if let_go.is_set():
                await outcome.note(retries=1)
            else:
                outcome.retry_after_s.append(error.retry_after_s)
                await outcome.note(refused=1)
            await let_go.wait()
            await asyncio.sleep(error.retry_after_s)


async def _one(call: Any, outcome: Round, let_go: asyncio.Event) -> None:
    tokens, ended = 0, ""
    while (response := await call.read()) is not grpc.aio.EOF:
        if response.HasField("tokens"):
            if tokens == 0 and not let_go.is_set():
                await outcome.note(accepted=1)
            tokens += len(response.tokens.token_ids)
            await let_go.wait()
        elif response.HasField("finished"):
            ended = f"{common_pb2.FinishReason.Name(response.finished.reason)} {response.finished.error.message}"
    if tokens == MAX_TOKENS:
        await outcome.note(finished=1)
    else:
        outcome.other_errors.append(f"{tokens} tokens instead of {MAX_TOKENS}: {ended}")
        await outcome.note()
