"""Streams of tokens over gRPC and over HTTP, with clients that cost as little as they can."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import grpc.aio

from headrace.v1 import inference_pb2, inference_pb2_grpc

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Streamed:
    """One stream."""

    first_s: float
    """To the first token."""
    tokens: int
    gaps_s: list[float]
    """From event to event."""


@dataclass(frozen=True)
class Together:
    """Some streams at once."""

    first_ms: float
    """Median over the streams."""
    tokens_per_s: float
    gap_p99_ms: float
    """Of all their tokens."""


One = Callable[[str, int], Awaitable[Streamed]]
"""Model and tokens → a stream, read to its end."""


def over_grpc(channel: grpc.aio.Channel) -> One:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def one(model: str, tokens: int) -> Streamed:
        request = inference_pb2.GenerateRequest(model=model)
        request.prompt.tokens.token_ids.append(5)
        request.stop.max_tokens = tokens
        seen, count = [time.monotonic()], 0
        async for event in stub.Generate(request, timeout=TIMEOUT_S):
            if event.HasField("tokens"):
                seen.append(time.monotonic())
                count += len(event.tokens.token_ids)
        return _streamed(seen, count)

    return one


def over_http(host: str, port: int) -> One:
    async def one(model: str, tokens: int) -> Streamed:
        seen, count = [time.monotonic()], 0
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        try:
            writer.write(request_bytes(model, tokens))
            async for line in reader:
                if b'"delta":{"content":"a' in line:
                    seen.append(time.monotonic())
                    count += 1
                elif line.startswith(b"data: [DONE]"):
                    break
        finally:
            writer.close()
        return _streamed(seen, count)

    return one


def _streamed(seen: list[float], count: int) -> Streamed:
    """`seen`: when it began, and when each event came."""
    gaps = [after - before for before, after in pairwise(seen)]
    return Streamed(gaps[0] if gaps else 0.0, count, gaps[1:])


def request_bytes(model: str, tokens: int) -> bytes:
    """A chat request as HTTP/1.1."""
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": tokens, "stream": True}
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def together(one: One, model: str, streams: int, tokens: int) -> Together:
    """Run them at once. Raises AssertionError when a token is missing."""
    began = time.monotonic()
    done = await asyncio.gather(*(one(model, tokens) for _ in range(streams)))
    took = time.monotonic() - began
    assert all(each.tokens == tokens for each in done), [each.tokens for each in done]
    gaps = sorted(gap for each in done for gap in each.gaps_s)
    p99 = gaps[len(gaps) * 99 // 100] if gaps else 0.0
    return Together(1000 * median(each.first_s for each in done), streams * tokens / took, 1000 * p99)
