"""Runs in Dynamo's interpreter: a closed loop of streamed completions over its HTTP API; prints JSON."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

import aiohttp


async def main() -> None:
    model = sys.argv[1]
    port, clients, requests, prompt_tokens, tokens, seed = (int(word) for word in sys.argv[2:])
    chance = random.Random(seed)
    prompts = iter([[chance.randrange(3, 240) for _ in range(prompt_tokens)] for _ in range(requests)])
    first: list[float] = []

    async def client(session: aiohttp.ClientSession) -> None:
        for prompt in prompts:
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
            sent, came = time.perf_counter(), None
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise RuntimeError(await response.text())
                async for line in response.content:
                    if came is None and line.startswith(b"data: {"):
                        came = time.perf_counter()
            if came is None:
                raise RuntimeError("an answer without a chunk")
            first.append(came - sent)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        start = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        seconds = time.perf_counter() - start
    first.sort()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "ttft_p50_s": first[len(first) // 2],
                "ttft_p99_s": first[int(0.99 * (len(first) - 1))],
            }
        )
    )


asyncio.run(main())
